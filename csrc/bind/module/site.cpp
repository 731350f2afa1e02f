#include "bind/module/site.h"

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/scope_exit.h"
#include "runtime/interrupt.h"
#include "runtime/observe/site.h"

namespace py = pybind11;

namespace ringcomm {

namespace {

constexpr std::size_t kMostSites = 1 << 14;  // limits memory if a program generates code at run time

struct Place {
  PyCodeObject* code;
  int instruction;
  bool operator==(const Place& other) const { return code == other.code && instruction == other.instruction; }
};
struct HashPlace {
  std::size_t operator()(const Place& place) const {
    return reinterpret_cast<std::uintptr_t>(place.code) * 31 + static_cast<std::size_t>(place.instruction);
  }
};

// Guarded by the GIL; never destroyed, nor is anything that it points to.
struct Sites {
  std::unordered_map<Place, const char*, HashPlace> known;  // null: not the user's code
  std::string package, torch;
};
Sites& sites() {
  static auto* const all = new Sites;
  return *all;
}

// Returns a path as text, which need not be UTF-8.
std::string utf8(const py::object& path) {
  return py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(path.ptr(), "utf-8", "backslashreplace"));
}

// Returns for instance "/lib/python3/site-packages/torch/"; empty if the module has not been imported.
std::string folder_of(const char* module) {
  PyObject* const found = PyDict_GetItemString(PyImport_GetModuleDict(), module);  // borrowed
  if (!found || !PyObject_HasAttrString(found, "__file__")) return {};
  const py::object file = py::handle(found).attr("__file__");
  if (!py::isinstance<py::str>(file)) return {};
  const std::string path = utf8(file);
  return path.substr(0, path.rfind('/') + 1);
}

bool within(std::string_view path, const std::string& folder) {
  return !folder.empty() && path.substr(0, folder.size()) == folder;
}

bool is_users(std::string_view path) {
  Sites& all = sites();
  if (all.package.empty()) all.package = folder_of("ringcomm");
  if (all.torch.empty()) all.torch = folder_of("torch");
  constexpr std::string_view kContexts = "/contextlib.py";
  const bool context = path.size() > kContexts.size() && path.substr(path.size() - kContexts.size()) == kContexts;
  return !within(path, all.package) && !within(path, all.torch) && !context && path.substr(0, 7) != "<frozen";
}

std::string shown(const std::string& path) {
  std::array<char, PATH_MAX> here{};
  if (!getcwd(here.data(), here.size())) return path;
  const std::string folder = std::string(here.data()) + '/';
  return within(path, folder) ? path.substr(folder.size()) : path;
}

const char* describe(PyFrameObject* frame, PyCodeObject* code) {
  const py::object name =
      py::reinterpret_steal<py::object>(PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), "co_filename"));
  if (!name) return PyErr_Clear(), nullptr;
  const std::string path = utf8(py::str(name));
  if (!is_users(path)) return nullptr;
  const std::string text = shown(path) + ':' + std::to_string(PyFrame_GetLineNumber(frame));
  return (new std::string(text))->c_str();
}

// Null: not the user's code.
const char* site_of(PyFrameObject* frame) {
  Sites& all = sites();
  PyCodeObject* const code = PyFrame_GetCode(frame);
#if PY_VERSION_HEX >= 0x030b0000
  const Place place{code, PyFrame_GetLasti(frame)};
#else
  const Place place{code, PyFrame_GetLineNumber(frame)};
#endif
  const auto found = all.known.find(place);
  if (found != all.known.end()) {
    Py_DECREF(code);
    return found->second;
  }
  if (all.known.size() >= kMostSites) {
    Py_DECREF(code);
    return "a place beyond the first ones";
  }
  const char* const text = describe(frame, code);
  all.known.emplace(place, text);  // keeps the code object alive, so that its address is not reused
  return text;
}

bool python_ends() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

const char* site_without_gil() {
  if (python_ends()) return "";
  if (!PyGILState_GetThisThreadState()) return "";  // a thread that has never run Python
  const py::gil_scoped_acquire acquire;
  if (PyErr_Occurred()) return "";  // a signal handler has raised
  return python_site();
}

}  // namespace

const char* python_site() {
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  const char* site = nullptr;
  while (frame) {
    site = site_of(frame);
    PyFrameObject* const outer = site ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  return site ? site : "";
}

namespace {

bool handles_signals() { return syscall(SYS_gettid) == getpid() && !python_ends() && PyGILState_GetThisThreadState(); }

bool handle_signals() {
  if (!handles_signals()) return false;
  const py::gil_scoped_acquire acquire;
  return PyErr_Occurred() || PyErr_CheckSignals() != 0;  // the exception stays set in this thread
}

// Packages whose threads call no communicator. Threads of any other package might.
constexpr std::array<std::string_view, 20> kQuiet = {
    "tqdm",   "rich",    "wandb",   "tensorboard", "tensorboardX",   "mlflow",        "comet_ml",
    "aim",    "clearml", "neptune", "swanlab",     "ipykernel",      "IPython",       "zmq",
    "pydevd", "debugpy", "execnet", "sentry_sdk",  "pytest_timeout", "_pydevd_bundle"};
constexpr std::array<std::string_view, 6> kQuietModules = {
    "multiprocessing.queues",
    "multiprocessing.resource_sharer",  // lends tensors to other processes
    "ringcomm.comm.hosts",
    "torch.utils.data._utils.pin_memory",
    "torch._inductor.compile_worker.subproc_pool",
    "torch._inductor.compile_worker.timer"};
constexpr std::string_view kEventLoop = "tornado";  // ipykernel's threads run it; those of a program may call anything

struct Frame {
  std::string module, function;
  std::string package() const { return module.substr(0, module.find('.')); }
};

// Returns the frames of a thread from the innermost to the outermost, without those of threading.
std::vector<Frame> frames_of(py::object frame) {
  std::vector<Frame> all;
  for (; !frame.is_none(); frame = frame.attr("f_back")) {
    const py::object module = frame.attr("f_globals").attr("get")("__name__", "");
    if (!py::isinstance<py::str>(module)) throw py::type_error("a module without a name");
    Frame where{utf8(module), utf8(frame.attr("f_code").attr("co_name"))};
    if (where.module != "threading") all.push_back(std::move(where));
  }
  return all;
}

// Returns the module of the function that a threading.Timer will call; empty for other threads.
std::string timer_of(const py::handle& ident, const py::module_& threading) {
  const py::object thread = threading.attr("_active").attr("get")(ident, py::none());
  if (!py::isinstance(thread, threading.attr("Timer"))) return {};
  const py::object module = py::getattr(thread.attr("function"), "__module__", py::none());
  return py::isinstance<py::str>(module) ? utf8(module) : std::string();
}

// Whether a thread was started by a package that is known to call no communicator, and runs only code of such packages,
// of its event loop and of the standard library.
bool is_quiet(const std::vector<Frame>& frames, const std::string& timer, const py::object& standard) {
  const auto is = [&](const auto& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (frames.empty()) return is(kQuiet, Frame{timer, {}}.package());  // else it has only just started
  const Frame& inner = frames.front();
  const Frame& outer = frames.back();
  if (inner.module == "ringcomm.comm.launch" && inner.function == "_run_threads") return true;  // waits for ranks
  if (outer.module == "ringcomm.comm.launch" && outer.function == "_watch_parent") return true;
  if (outer.module == "concurrent.futures.thread" && frames.size() == 1) return true;  // an idle worker
  if (!is(kQuiet, outer.package()) && !is(kQuietModules, outer.module)) return false;
  return std::all_of(frames.begin(), frames.end(), [&](const Frame& each) {
    const std::string package = each.package();
    return package == outer.package() || is(kQuiet, package) || package == kEventLoop || standard.contains(package);
  });
}

// Returns the frames of all threads, by thread. CPython up to 3.11 holds the lock of its list of threads during the
// call. If a garbage collection lets another thread run, that thread may wait for this lock while it holds the GIL, for
// ever (python/cpython issue 106883).
py::dict frames_by_thread(const py::module_& sys) {
  const bool was_enabled = PyGC_Disable() != 0;
  const ScopeExit restore([was_enabled] {
    if (was_enabled) PyGC_Enable();
  });
  return sys.attr("_current_frames")();
}

// Only reads, and executes no Python code, so that no signal handler runs in between.
bool has_only(const std::vector<std::uint64_t>& known) {
  if (python_ends() || !PyGILState_GetThisThreadState()) return false;
  const py::gil_scoped_acquire acquire;
  if (PyErr_Occurred()) return false;
  try {
    const py::module_ sys = py::module_::import("sys");
    const py::module_ threading = py::module_::import("threading");
    const py::object standard = sys.attr("stdlib_module_names");
    for (const auto& [ident, frame] : frames_by_thread(sys)) {
      const bool is_known = std::find(known.begin(), known.end(), ident.cast<std::uint64_t>()) != known.end();
      const auto frames = frames_of(py::reinterpret_borrow<py::object>(frame));
      if (!is_known && !is_quiet(frames, timer_of(ident, threading), standard)) return false;
    }
    return true;
  } catch (const std::exception&) {  // a thread that cannot be examined may make a call
    return false;
  }
}

}  // namespace

void serve_python_threads() {
  set_thread_source(&has_only);
  set_site_source(&site_without_gil);
  set_signal_source(&handles_signals, &handle_signals);
}

}  // namespace ringcomm
