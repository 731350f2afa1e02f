from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend as C10dBackend
from torch._C._distributed_c10d import ErrorType

from ringcomm.backend import DeviceEngineFactory

built_for: str

class Backend(C10dBackend):
    class Options(C10dBackend.Options):
        def __init__(self, timeout: timedelta = ...) -> None: ...
        def __copy__(self) -> Backend.Options: ...
        def __deepcopy__(self, memo: dict[int, Any]) -> Backend.Options: ...

    def __init__(
        self,
        engine: object,
        options: Backend.Options,
        device_factory: DeviceEngineFactory,
        host_memory: bool = False,
    ) -> None: ...
    def perform_nocolor_split(self, device: Any) -> None: ...
    @property
    def options(self) -> Backend.Options: ...
    def get_error(self) -> ErrorType: ...
