#include "cuda/vmm.h"

#if defined(RINGCOMM_EMULATE)
#include <sys/mman.h>
#else
#include <cuda.h>
#endif
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/types.h"
#include "cuda/runtime.h"

namespace ringcomm::cuda {

#if defined(RINGCOMM_EMULATE)

namespace {

char* map(int fd, std::size_t nbytes, int rank) {
  void* const data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED)
    fail(ErrorCode::kSystem, "communicator: rank ", rank, " expected ", nbytes, " bytes of emulated memory, got \"",
         std::strerror(errno), "\"; free memory");
  return static_cast<char*>(data);
}

}  // namespace

std::string why_no_vmm(int) { return ""; }

VmmRange vmm_create(int, std::size_t nbytes, int rank) {
  const int fd = memfd_create("ringcomm-vmm", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(nbytes)) != 0)
    fail(ErrorCode::kSystem, "communicator: rank ", rank, " expected a memory file of ", nbytes, " bytes, got \"",
         std::strerror(errno), "\"; free memory");
  return {map(fd, nbytes, rank), nbytes, static_cast<std::uint64_t>(fd)};
}

int vmm_export(const VmmRange& range, int) { return fcntl(static_cast<int>(range.allocation), F_DUPFD_CLOEXEC, 0); }

VmmRange vmm_open(int fd, std::size_t nbytes, int, int rank) {
  return {map(fd, nbytes, rank), nbytes, static_cast<std::uint64_t>(fcntl(fd, F_DUPFD_CLOEXEC, 0))};
}

void vmm_grant(const VmmRange&, int, int) {}

void vmm_release(VmmRange& range) noexcept {
  if (!range.data) return;
  munmap(range.data, range.nbytes);
  ::close(static_cast<int>(range.allocation));
  range = {};
}

#else

namespace {

// The driver's functions, by the versions that they had in CUDA 12.0.
struct Driver {
  decltype(&cuGetErrorString) get_error_string = nullptr;
  decltype(&cuDeviceGetAttribute) device_get_attribute = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_address = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuMemImportFromShareableHandle) import_handle = nullptr;
  bool complete = true;

  template <typename F>
  void look_up(F& function, const char* symbol) {
    void* const found = driver_function(symbol);
    if (!found) complete = false;
    function = reinterpret_cast<F>(found);
  }

  Driver() {
    look_up(get_error_string, "cuGetErrorString");
    look_up(device_get_attribute, "cuDeviceGetAttribute");
    look_up(granularity, "cuMemGetAllocationGranularity");
    look_up(create, "cuMemCreate");
    look_up(release, "cuMemRelease");
    look_up(reserve, "cuMemAddressReserve");
    look_up(free_address, "cuMemAddressFree");
    look_up(map, "cuMemMap");
    look_up(unmap, "cuMemUnmap");
    look_up(set_access, "cuMemSetAccess");
    look_up(export_handle, "cuMemExportToShareableHandle");
    look_up(import_handle, "cuMemImportFromShareableHandle");
  }
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  void check(CUresult status, const char* what, int rank) const {
    if (status == CUDA_SUCCESS) return;
    const char* text = nullptr;
    get_error_string(status, &text);
    fail(ErrorCode::kSystem, what, ": rank ", rank, " expected success, got ", text ? text : "an unknown error", " (",
         static_cast<int>(status), "); free memory, or set RINGCOMM_CUDA_HANDLES=ipc to do without this call");
  }
};

CUmemAllocationProp properties_of(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {};
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

CUdeviceptr address_of(const VmmRange& range) { return reinterpret_cast<CUdeviceptr>(range.data); }

// Gives an allocation an address; takes the allocation over, also when it fails.
VmmRange map(CUmemGenericAllocationHandle allocation, std::size_t nbytes, int device, int rank) {
  const Driver& driver = Driver::get();
  VmmRange range{nullptr, nbytes, allocation};
  CUdeviceptr address = 0;
  bool mapped = false;
  try {
    driver.check(driver.reserve(&address, nbytes, 0, 0, 0), "cuMemAddressReserve", rank);
    driver.check(driver.map(address, nbytes, 0, allocation, 0), "cuMemMap", rank);
    mapped = true;
    range.data = reinterpret_cast<char*>(address);
    vmm_grant(range, device, rank);
  } catch (...) {
    if (mapped) driver.unmap(address, nbytes);
    if (address) driver.free_address(address, nbytes);
    driver.release(allocation);
    throw;
  }
  return range;
}

}  // namespace

std::string why_no_vmm(int device) {
  const Driver& driver = Driver::get();
  if (!driver.complete) return "the driver lacks the virtual memory functions";
  int supported = 0;
  if (driver.device_get_attribute(&supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                                  device) != CUDA_SUCCESS ||
      !supported)
    return "the device cannot export memory as a file descriptor";
  return "";
}

VmmRange vmm_create(int device, std::size_t nbytes, int rank) {
  const Driver& driver = Driver::get();
  const CUmemAllocationProp properties = properties_of(device);
  std::size_t granularity = 0;
  driver.check(driver.granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
               "cuMemGetAllocationGranularity", rank);
  const std::size_t rounded = round_up(nbytes, granularity);
  CUmemGenericAllocationHandle allocation = 0;
  driver.check(driver.create(&allocation, rounded, &properties, 0), "cuMemCreate", rank);
  return map(allocation, rounded, device, rank);
}

int vmm_export(const VmmRange& range, int rank) {
  const Driver& driver = Driver::get();
  int fd = -1;
  driver.check(driver.export_handle(&fd, range.allocation, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
               "cuMemExportToShareableHandle", rank);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  return fd;
}

VmmRange vmm_open(int fd, std::size_t nbytes, int device, int rank) {
  const Driver& driver = Driver::get();
  if (!driver.complete)
    fail(ErrorCode::kUnsupported, "connect: rank ", rank, " expected a driver with virtual memory functions, since a ",
         "peer's memory needs them, got none; update the driver");
  CUmemGenericAllocationHandle allocation = 0;
  driver.check(driver.import_handle(&allocation, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               "cuMemImportFromShareableHandle", rank);
  return map(allocation, nbytes, device, rank);
}

void vmm_grant(const VmmRange& range, int device, int rank) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const Driver& driver = Driver::get();
  driver.check(driver.set_access(address_of(range), range.nbytes, &access, 1), "cuMemSetAccess", rank);
}

void vmm_release(VmmRange& range) noexcept {
  if (!range.data) return;
  const Driver& driver = Driver::get();
  driver.unmap(address_of(range), range.nbytes);
  driver.free_address(address_of(range), range.nbytes);
  driver.release(range.allocation);
  range = {};
}

#endif

}  // namespace ringcomm::cuda
