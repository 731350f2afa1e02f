// The runtime API: errors, devices, streams, events, launches. Memory is in memory.cpp, graphs in graph.cpp.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <utility>

#include "gpu.h"

namespace ringcomm::emulator {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_of_thread = 0;  // where the runtime makes a context, for a thread that has none
thread_local CUcontext context_of_thread = nullptr;
std::atomic<long> calls{0};
std::atomic<std::uint64_t> contexts{0};      // a bit for each device that has its primary context
std::vector<std::pair<int, int>>& peers() {  // device, peer: enabled; under the mutex of the GPU
  static auto* const all = new std::vector<std::pair<int, int>>;
  return *all;
}

cudaError_t check_device(int device) {
  const Config& config = Gpu::get().config;
  if (config.no_driver) return cudaErrorInsufficientDriver;
  if (config.devices == 0) return cudaErrorNoDevice;
  return device >= 0 && device < config.devices ? cudaSuccess : cudaErrorInvalidDevice;
}

CUcontext primary_context(int device) {
  static std::array<CUctx_st, 64>& all = *[] {
    auto* const made = new std::array<CUctx_st, 64>;  // threads may outlive static objects
    for (int i = 0; i < 64; ++i) (*made)[i].device = i;
    return made;
  }();
  contexts.fetch_or(std::uint64_t{1} << device);
  return &all[device];
}

template <typename Call>
cudaError_t on_stream(cudaStream_t handle, const Call& call) {
  return locked([&](Gpu& gpu, std::unique_lock<std::mutex>& lock) {
    Stream* const stream = gpu.resolve(handle, current_device());
    return stream ? call(gpu, lock, stream) : cudaErrorInvalidResourceHandle;
  });
}
template <typename Call>
cudaError_t on_event(cudaEvent_t event, const Call& call) {
  if (!event) return note(cudaErrorInvalidResourceHandle);
  return locked([&](Gpu& gpu, std::unique_lock<std::mutex>& lock) { return call(gpu, lock, event->state); });
}

cudaError_t check_launch(const Gpu& gpu, const Stream* stream, const Work& work) {
  const auto volume = [](dim3 d) { return static_cast<unsigned long long>(d.x) * d.y * d.z; };
  if (!work.body.call) return cudaErrorInvalidDeviceFunction;
  if (volume(work.grid) == 0 || volume(work.block) == 0 || volume(work.block) > 1024)
    return cudaErrorInvalidConfiguration;
  if (stream->device != current_device()) return cudaErrorInvalidResourceHandle;
  const int most = gpu.most_resident(static_cast<unsigned>(volume(work.block)));
  if (most == 0) return cudaErrorLaunchOutOfResources;
  const auto room = static_cast<unsigned long long>(gpu.config.sms) * most;
  return work.cooperative && volume(work.grid) > room ? cudaErrorCooperativeLaunchTooLarge : cudaSuccess;
}

}  // namespace

cudaError_t note(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
// Calls in a context that the program has made fail here, because the engine must work in the primary context.
cudaError_t usable() {
  count_call();
  if (const cudaError_t error = check_device(current_device())) return error;
  if (!context_of_thread) context_of_thread = primary_context(device_of_thread);
  if (!context_of_thread->primary) return cudaErrorDeviceUninitialized;
  Gpu& gpu = Gpu::get();
  std::lock_guard<std::mutex> lock(gpu.mutex);
  return gpu.error_of(current_device());
}
void count_call() { calls.fetch_add(1, std::memory_order_relaxed); }
long calls_so_far() { return calls.load(); }
int current_device() { return context_of_thread ? context_of_thread->device : device_of_thread; }
bool has_context(int device) { return contexts.load() >> device & 1; }

cudaError_t launch_body(const char* name, Body body, dim3 grid, dim3 block, cudaStream_t handle, bool cooperative) {
  return on_stream(handle, [&](Gpu& gpu, std::unique_lock<std::mutex>&, Stream* stream) {
    Work work{Kind::kKernel, name, std::move(body), grid, block, cooperative};
    if (const cudaError_t error = check_launch(gpu, stream, work)) return error;
    return submit(gpu, stream, std::move(work));
  });
}

}  // namespace ringcomm::emulator

using namespace ringcomm::emulator;
using Lock = std::unique_lock<std::mutex>;

// ---- errors, devices ------------------------------------------------------------------------------------------------

const char* cudaGetErrorName(cudaError_t error) {
#define RINGCOMM_NAME(name, value, text) \
  if (error == name) return #name;
  RINGCOMM_CUDA_ERRORS(RINGCOMM_NAME)
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
#define RINGCOMM_TEXT(name, value, text) \
  if (error == name) return text;
  RINGCOMM_CUDA_ERRORS(RINGCOMM_TEXT)
  return "unrecognized error code";
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = Gpu::get().config.no_driver ? 0 : CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  const cudaError_t error = check_device(0);
  *count = error ? 0 : Gpu::get().config.devices;
  return note(error);
}
cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = check_device(device)) return note(error);
  device_of_thread = device;
  context_of_thread = primary_context(device);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return note(check_device(current_device()));
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  count_call();
  *context = context_of_thread;
  return check_device(0);
}
CUresult cuCtxSetCurrent(CUcontext context) {
  count_call();
  context_of_thread = context;
  return check_device(0);
}
CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return check_device(index);
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (const cudaError_t error = check_device(device)) return error;
  *context = primary_context(device);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return locked([](Gpu& gpu, Lock& lock) {
    if (const cudaError_t error = forbid_in_capture()) return error;
    gpu.wait_device(lock, current_device());
    return gpu.error_of(current_device());
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (const cudaError_t error = check_device(device)) return note(error);
  const Config& config = Gpu::get().config;
  cudaDeviceProp p{};
  std::snprintf(p.name, sizeof p.name, "emulated");
  std::snprintf(p.uuid.bytes, sizeof p.uuid.bytes, "emulated-%d", device);
  p.totalGlobalMem = std::size_t{64} << 30;
  p.sharedMemPerBlock = p.sharedMemPerMultiprocessor = p.sharedMemPerBlockOptin = 48 << 10;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.warpSize = kWarp;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsPerMultiProcessor = config.sm_threads;
  p.maxBlocksPerMultiProcessor = 32;
  for (int i = 0; i < 3; ++i) p.maxThreadsDim[i] = i < 2 ? 1024 : 64, p.maxGridSize[i] = i == 0 ? 0x7fffffff : 65535;
  p.major = 9;
  p.multiProcessorCount = config.sms;
  p.l2CacheSize = 50 << 20;
  p.canMapHostMemory = p.concurrentKernels = p.asyncEngineCount = p.unifiedAddressing = 1;
  p.pageableMemoryAccess = p.hostNativeAtomicSupported = p.cooperativeLaunch = 1;
  p.pciBusID = device + 1;
  *properties = p;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (const cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlock);
      break;
    case cudaDevAttrWarpSize:
      *value = p.warpSize;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
      *value = p.regsPerBlock;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrClockRate:
    case cudaDevAttrMemoryClockRate:
      *value = 1'000'000;
      break;  // kHz
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = 64;
      break;
    case cudaDevAttrIntegrated:
    case cudaDevAttrComputeMode:
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId:
    case cudaDevAttrManagedMemory:
      *value = 0;
      break;
    case cudaDevAttrPciBusId:
      *value = p.pciBusID;
      break;
    case cudaDevAttrMpsEnabled:  // processes do run at the same time here
      *value = Gpu::get().config.no_mps ? 0 : 1;
      break;
    case cudaDevAttrL2CacheSize:
      *value = p.l2CacheSize;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = p.maxBlocksPerMultiProcessor;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrHostNativeAtomicSupported:
    case cudaDevAttrPageableMemoryAccess:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrCooperativeLaunch:
      *value = 1;
      break;
    default:
      return note(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int nbytes, int device) {
  if (const cudaError_t error = check_device(device)) return note(error);
  if (std::snprintf(id, nbytes, "0000:%02X:00.0", device + 1) >= nbytes) return note(cudaErrorInvalidValue);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return note(usable());
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (check_device(device) || check_device(peer)) return note(cudaErrorInvalidDevice);
  *can = device != peer && !Gpu::get().config.no_peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  int can = 0;
  if (const cudaError_t error = cudaDeviceCanAccessPeer(&can, current_device(), peer)) return error;
  if (!can) return note(current_device() == peer ? cudaErrorInvalidDevice : cudaErrorPeerAccessUnsupported);
  return locked([&](Gpu&, Lock&) {
    const std::pair<int, int> pair{current_device(), peer};
    if (std::find(peers().begin(), peers().end(), pair) != peers().end()) return cudaErrorPeerAccessAlreadyEnabled;
    peers().push_back(pair);
    return cudaSuccess;
  });
}
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int from, int to) {
  int can = 0;
  if (const cudaError_t error = cudaDeviceCanAccessPeer(&can, from, to)) return error;
  if (from == to) return note(cudaErrorInvalidDevice);
  *value = attribute == cudaDevP2PAttrPerformanceRank ? 0 : can;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char*, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = usable();
  return note(error || result ? error : cudaErrorSymbolNotFound);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPoint(symbol, function, flags, result);
}

// ---- streams --------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return locked([&](Gpu& gpu, Lock&) {
    if (!stream || flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
    *stream = gpu.create_stream(current_device(), flags);
    return cudaSuccess;
  });
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (!stream) return note(cudaErrorInvalidResourceHandle);
  return on_stream(stream, [](Gpu& gpu, Lock&, Stream* s) {
    if (s->legacy) return cudaErrorInvalidResourceHandle;
    leave_capture(s);
    gpu.destroy(s);
    return cudaSuccess;
  });
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return on_stream(stream, [](Gpu& gpu, Lock& lock, Stream* s) {
    if (const cudaError_t error = forbid_in_capture(s)) return error;
    const int device = s->device;
    gpu.wait(lock, s);
    return gpu.error_of(device);
  });
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return on_stream(stream, [](Gpu& gpu, Lock&, Stream* s) {
    if (const cudaError_t error = forbid_in_capture(s)) return error;
    if (!gpu.idle(s)) return cudaErrorNotReady;
    acquire(&s->sync);
    return gpu.error_of(s->device);
  });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (!event) return note(cudaErrorInvalidResourceHandle);
  return on_stream(stream, [&](Gpu& gpu, Lock&, Stream* s) { return wait_event(gpu, s, event->state); });
}
CUresult cuStreamBatchMemOp(cudaStream_t stream, unsigned count, CUstreamBatchMemOpParams* operations, unsigned flags) {
  if (Gpu::get().config.no_mem_ops) return cudaErrorNotSupported;
  if (flags || count >= 256) return cudaErrorInvalidValue;
  return on_stream(stream, [&](Gpu& gpu, Lock&, Stream* s) {
    for (const CUstreamBatchMemOpParams* op = operations; op < operations + count; ++op) {
      const bool waits = op->operation == CU_STREAM_MEM_OP_WAIT_VALUE_32;
      if (!waits && op->operation != CU_STREAM_MEM_OP_WRITE_VALUE_32) return cudaErrorInvalidValue;
      const Word word{reinterpret_cast<std::uint32_t*>(op->waitValue.address), op->waitValue.value};
      if (!word.at || op->waitValue.address % 4 != 0 || op->waitValue.flags) return cudaErrorInvalidValue;
      Work work{waits ? Kind::kWaitWord : Kind::kCall};
      work.word = word;
      if (!waits) work.call = [word] { __atomic_store_n(word.at, word.value, __ATOMIC_RELEASE); };
      if (const cudaError_t error = submit(gpu, s, std::move(work))) return error;
    }
    return cudaSuccess;
  });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* user_data) {
  if (!call) return note(cudaErrorInvalidValue);
  return on_stream(stream, [&](Gpu& gpu, Lock&, Stream* s) {
    return submit(gpu, s, Work{Kind::kHost, {}, {}, {}, {}, false, [=] { call(user_data); }});
  });
}

// ---- events ---------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return locked([&](Gpu&, Lock&) {
    if (!event || flags > 7) return cudaErrorInvalidValue;
    if (flags & cudaEventInterprocess) return cudaErrorNotSupported;
    auto state = std::make_shared<EventState>();
    state->timed = !(flags & cudaEventDisableTiming);
    state->device = current_device();
    *event = new CUevent_st{std::move(state)};
    return cudaSuccess;
  });
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return on_event(event, [&](Gpu&, Lock&, const std::shared_ptr<EventState>&) {
    delete event;
    return cudaSuccess;
  });
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (!event) return note(cudaErrorInvalidResourceHandle);
  return on_stream(stream, [&](Gpu& gpu, Lock&, Stream* s) {
    return event->state->device == s->device ? record(gpu, event->state, s) : cudaErrorInvalidResourceHandle;
  });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return on_event(event, [](Gpu& gpu, Lock&, const std::shared_ptr<EventState>& state) {
    if (const cudaError_t error = forbid_in_capture()) return error;
    if (state->capture) return cudaErrorCapturedEvent;
    if (state->last && !state->last->reached) return cudaErrorNotReady;
    if (state->last) acquire(&state->last->sync);
    return gpu.error_of(state->device);
  });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return on_event(event, [](Gpu& gpu, Lock& lock, const std::shared_ptr<EventState>& state) {
    if (state->capture) return cudaErrorCapturedEvent;
    const auto point = state->last;
    const int device = state->device;
    if (point) gpu.wait(lock, point);
    return gpu.error_of(device);
  });
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  if (!begin || !end) return note(cudaErrorInvalidResourceHandle);
  return locked([&](Gpu&, Lock&) {
    const EventState &a = *begin->state, &b = *end->state;
    if (!a.timed || !b.timed || !a.last || !b.last) return cudaErrorInvalidResourceHandle;
    if (!a.last->reached || !b.last->reached) return cudaErrorNotReady;
    *ms = static_cast<float>((static_cast<double>(b.last->at_ns) - static_cast<double>(a.last->at_ns)) * 1e-6);
    return cudaSuccess;
  });
}

// ---- kernels --------------------------------------------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  if (const cudaError_t error = usable()) return note(error);
  if (!kernel) return note(cudaErrorInvalidDeviceFunction);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int block_threads,
                                                          std::size_t dynamic_shared) {
  if (const cudaError_t error = usable()) return note(error);
  if (!kernel) return note(cudaErrorInvalidDeviceFunction);
  if (block_threads <= 0 || dynamic_shared > 0) return note(cudaErrorInvalidValue);
  *blocks = block_threads > 1024 ? 0 : Gpu::get().most_resident(static_cast<unsigned>(block_threads));
  return cudaSuccess;
}
