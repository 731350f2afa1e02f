#include "cuda/runtime.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iomanip>

#if !defined(RINGCOMM_EMULATE)
#include <cuda.h>
#endif

#include "core/engine.h"
#include "core/error.h"

namespace ringcomm {

namespace {

std::string version(int number) { return concat(number / 1000, '.', number % 1000 / 10); }

}  // namespace

std::string cuda_build() { return RINGCOMM_CUDA_BUILD; }

std::string why_no_cuda() {
  int devices = 0, driver = 0, runtime = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  cudaGetLastError();  // a missing driver is no failure of a later call
  if (status == cudaSuccess && devices > 0) return "";
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = 0;
  if (status == cudaSuccess || status == cudaErrorNoDevice)
    return "no device: the CUDA driver sees no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES";
  if (driver == 0)
    return concat("no driver: libcuda.so.1 was not found; install an NVIDIA driver for CUDA ", version(runtime),
                  " or newer, or start the container with GPUs");
  if (status == cudaErrorInsufficientDriver)
    return concat("old driver: it serves CUDA ", version(driver), " and this build needs ", version(runtime),
                  "; update the NVIDIA driver");
  if (status == cudaErrorInitializationError)
    return "no context: CUDA could not start, most often since this process was forked after its parent had used CUDA; "
           "start ranks with spawn";
  return concat("no usable driver: ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ", driver for CUDA ",
                version(driver), "); see nvidia-smi and the kernel log");
}

namespace cuda {

namespace {

constexpr auto kUnloading = static_cast<cudaError_t>(4);  // cudaErrorCudartUnloading
std::atomic<bool> ending{false};

// Exit handlers run in reverse order: ours is registered after the runtime has started, so it runs before the
// runtime's.
void watch_for_exit() {
  [[maybe_unused]] static const int registered = std::atexit([] { ending.store(true, std::memory_order_relaxed); });
}

// After these errors nothing works in this process any more, and every later call returns the same error. They are
// listed by number, because headers of different toolkits know different names.
bool is_sticky(cudaError_t status) {
  switch (static_cast<int>(status)) {
    case 214:  // uncorrectable ECC error
    case 220:  // uncorrectable NVLink error
    case 226:  // contained memory error
    case 700:  // illegal address
    case 702:  // launch timeout
    case 710:  // device-side assert
    case 714:  // hardware stack error
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // invalid address space
    case 718:  // invalid program counter
    case 719:  // launch failure
    case 721:  // tensor leak
      return true;
    default:
      return false;
  }
}

const char* advice(cudaError_t status) {
  if (is_sticky(status))
    return "; the CUDA context of this process is lost (the fault may lie in an earlier kernel of anyone: see "
           "compute-sanitizer), restart the process";
  switch (status) {
    case cudaErrorMemoryAllocation:
      return "; free memory (torch.cuda.empty_cache()), or use fewer channels and smaller slots";
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
      return "; see nvidia-smi, CUDA_VISIBLE_DEVICES and the device index";
    case cudaErrorNoKernelImageForDevice:
      return "; this build has no code for the device, build it for its architecture";
    case cudaErrorCooperativeLaunchTooLarge:
      return "; the ranks on this device need more blocks than fit at once, use fewer channels";
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorNotSupported:
      return "; this machine or driver does not offer it, use another backend here";
    case cudaErrorStreamCaptureImplicit:
      return "; a blocking stream is being captured: call on a stream of its own, or capture a non-blocking one";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
      return "; do this before or after the capture of a graph, not within it";
    default:
      return "; see the kernel log (dmesg, Xid) if it persists";
  }
}

ErrorCode code_of(cudaError_t status) {
  switch (status) {
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorCooperativeLaunchTooLarge:
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorNotSupported:
      return ErrorCode::kUnsupported;
    default:
      return ErrorCode::kSystem;
  }
}

int attribute(cudaDeviceAttr which, int device, int rank) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute", rank);
  return value;
}

std::string hexadecimal(const char* bytes, std::size_t count) {
  std::ostringstream out;
  for (std::size_t i = 0; i < count; ++i)
    out << std::hex << std::setw(2) << std::setfill('0') << static_cast<int>(static_cast<unsigned char>(bytes[i]));
  return out.str();
}

}  // namespace

void check(cudaError_t status, const char* what, int rank) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  fail(code_of(status), what, ": rank ", rank, " expected success, got ", cudaGetErrorString(status), " (",
       cudaGetErrorName(status), ")", advice(status));
}

bool tolerate(cudaError_t status, const char* what) noexcept {
  if (status == cudaSuccess || status == kUnloading) return true;
  cudaGetLastError();
  static std::atomic<bool> said{false};
  if (!said.exchange(true))
    std::fprintf(stderr, "ringcomm: %s, while closing, gave %s (%s)%s\n", what, cudaGetErrorString(status),
                 cudaGetErrorName(status), advice(status));
  return false;
}

bool process_is_ending() { return ending.load(std::memory_order_relaxed); }

#if !defined(RINGCOMM_EMULATE)
void* driver_function(const char* symbol) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t status = cudaGetDriverEntryPointByVersion(symbol, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(symbol, &found, cudaEnableDefault, &result);
#endif
  if (status != cudaSuccess) cudaGetLastError();
  return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
}
#endif

namespace {

// The driver's errors are those of the runtime under other names.
template <typename Function, typename... Args>
cudaError_t ask_driver(Function* function, Args... args) {
  return function ? static_cast<cudaError_t>(function(args...)) : cudaErrorSymbolNotFound;
}

cudaError_t set_current(CUcontext context) {
  static const auto function = RINGCOMM_DRIVER(cuCtxSetCurrent);
  return ask_driver(function, context);
}

CUcontext current_context(int rank) {
  static const auto function = RINGCOMM_DRIVER(cuCtxGetCurrent);
  CUcontext context = nullptr;
  check(ask_driver(function, &context), "cuCtxGetCurrent", rank);
  return context;
}

// Made by the first caller and never released, because other code of this process works in it.
CUcontext make_primary(int device, int rank) {
  CUdevice handle = 0;
  CUcontext context = nullptr;
  check(ask_driver(RINGCOMM_DRIVER(cuDeviceGet), &handle, device), "cuDeviceGet", rank);
  check(ask_driver(RINGCOMM_DRIVER(cuDevicePrimaryCtxRetain), &context, handle), "cuDevicePrimaryCtxRetain", rank);
  return context;
}

// The primary context of a device, once a guard has asked for it. The driver is not asked at every change: the context
// lives until the device is reset, and a context that is gone is refused when it is to become current.
std::atomic<CUcontext>& known_primary(int device) {
  static std::array<std::atomic<CUcontext>, 64> known{};
  return known.at(static_cast<std::size_t>(device));
}

}  // namespace

DeviceGuard::DeviceGuard(int device, int rank) {
  watch_for_exit();
  std::atomic<CUcontext>& known = known_primary(device);
  const CUcontext before = current_context(rank), primary = known.load(std::memory_order_acquire);
  if (primary && before == primary) return;
  before_ = before;
  if (!primary || set_current(primary) != cudaSuccess) {
    const CUcontext made = make_primary(device, rank);
    check(set_current(made), "cuCtxSetCurrent", rank);
    known.store(made, std::memory_order_release);
  }
  changed_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (changed_) tolerate(set_current(static_cast<CUcontext>(before_)), "cuCtxSetCurrent");
}

RelaxedCapture::RelaxedCapture(int rank) {
  check(cudaThreadExchangeStreamCaptureMode(&before_), "cudaThreadExchangeStreamCaptureMode", rank);
}

RelaxedCapture::~RelaxedCapture() {
  tolerate(cudaThreadExchangeStreamCaptureMode(&before_), "cudaThreadExchangeStreamCaptureMode");
}

std::string DeviceFacts::text() const {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << name << ", " << multiprocessors << " SMs, sm_" << major << minor << ", "
      << static_cast<double>(memory_bytes) / (1 << 30) << " GiB, L2 " << static_cast<double>(l2_bytes) / (1 << 20)
      << " MiB, " << bus_id;
  return out.str();
}

DeviceFacts facts_of(int device, int rank) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess)
    fail(ErrorCode::kUnsupported, "communicator: rank ", rank, " expected a CUDA device, got ", why_no_cuda());
  if (device < 0 || device >= devices)
    fail(ErrorCode::kInvalid, "communicator: rank ", rank, " expected a device index below ", devices,
         " (the visible GPUs), got ", device, "; see CUDA_VISIBLE_DEVICES");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties", rank);
  DeviceFacts facts;
  char bus_id[32] = {};
  check(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, device), "cudaDeviceGetPCIBusId", rank);
  facts.bus_id = bus_id;
  facts.name = properties.name;
  facts.uuid = hexadecimal(properties.uuid.bytes, sizeof properties.uuid.bytes);
  facts.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device, rank);
  facts.major = attribute(cudaDevAttrComputeCapabilityMajor, device, rank);
  facts.minor = attribute(cudaDevAttrComputeCapabilityMinor, device, rank);
  constexpr auto kMpsEnabled = static_cast<cudaDeviceAttr>(133);  // by number: unknown to older toolkits
  int mps = 0;
  if (cudaDeviceGetAttribute(&mps, kMpsEnabled, device) != cudaSuccess) cudaGetLastError();
  facts.mps = mps != 0;
  facts.l2_bytes = attribute(cudaDevAttrL2CacheSize, device, rank);
  facts.memory_bytes = properties.totalGlobalMem;
  return facts;
}

}  // namespace cuda
}  // namespace ringcomm
