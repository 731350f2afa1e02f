// A subset of the CUDA runtime API, under its own names, for a GPU that one thread of this process emulates. A build
// with RINGCOMM_EMULATE has this folder first on its include path, so the engine's host code gets this header in place
// of NVIDIA's. Calls that are missing here do not compile; the others fail as the real ones do.
//
// What differs from a device:
//   - Device memory is host memory, and any host pointer counts as memory of the current device.
//   - Copies are asynchronous from and to all memory; the real API waits for some copies of pageable memory.
//   - Stream 0 (legacy) waits for all blocking streams of its device and they for it, as in CUDA. There is no
//     per-thread default stream. A copy between two devices on it waits for all earlier work of both, and their later
//     work for it, if the call names the devices or the memory was allocated here.
//   - A host function runs in a thread of its own and, as in CUDA, may not call this API.
//
// Environment, read once:
//   RINGCOMM_EMULATED_DEVICES=1          how many; 0: none (cudaErrorNoDevice)
//   RINGCOMM_EMULATED_SMS=8              of each, with room for RINGCOMM_EMULATED_SM_THREADS=2048 threads
//   RINGCOMM_EMULATED_SEED=0             order of threads; 0: first come, first served
//   RINGCOMM_EMULATED_PREEMPT=0          n: a switch at every n-th access too; 0: only where a thread waits
//   RINGCOMM_EMULATED_NO_MEM_OPS=1       streams cannot wait for words in memory (cudaErrorNotSupported)
//   RINGCOMM_EMULATED_NO_PEER=1          devices cannot see each other's memory
//   RINGCOMM_EMULATED_NO_DRIVER=1        every call gives cudaErrorInsufficientDriver
#pragma once

#include "emulator.h"

#define CUDART_VERSION 13000
#define CUDART_CB

#define RINGCOMM_CUDA_ERRORS(X)                                                                               \
  X(cudaSuccess, 0, "no error")                                                                               \
  X(cudaErrorInvalidValue, 1, "invalid argument")                                                             \
  X(cudaErrorMemoryAllocation, 2, "out of memory")                                                            \
  X(cudaErrorInitializationError, 3, "initialization error")                                                  \
  X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                                       \
  X(cudaErrorInvalidDevicePointer, 17, "invalid device pointer")                                              \
  X(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                                 \
  X(cudaErrorInsufficientDriver, 35, "CUDA driver version is insufficient for CUDA runtime version")          \
  X(cudaErrorInvalidDeviceFunction, 98, "invalid device function")                                            \
  X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                                             \
  X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                                    \
  X(cudaErrorDeviceUninitialized, 201, "invalid device context")                                              \
  X(cudaErrorMapBufferObjectFailed, 205, "mapping of buffer object failed")                                   \
  X(cudaErrorNoKernelImageForDevice, 209, "no kernel image is available for execution on the device")         \
  X(cudaErrorPeerAccessUnsupported, 217, "peer access is not supported between these two devices")            \
  X(cudaErrorOperatingSystem, 304, "OS call failed or operation not supported on this OS")                    \
  X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                                           \
  X(cudaErrorIllegalState, 401, "the operation cannot be performed in the present state")                     \
  X(cudaErrorSymbolNotFound, 500, "named symbol not found")                                                   \
  X(cudaErrorNotReady, 600, "device not ready")                                                               \
  X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")                                 \
  X(cudaErrorLaunchOutOfResources, 701, "too many resources requested for launch")                            \
  X(cudaErrorLaunchTimeout, 702, "the launch timed out and was terminated")                                   \
  X(cudaErrorPeerAccessAlreadyEnabled, 704, "peer access is already enabled")                                 \
  X(cudaErrorPeerAccessNotEnabled, 705, "peer access has not been enabled")                                   \
  X(cudaErrorHostMemoryAlreadyRegistered, 712, "part or all of the requested memory range is already mapped") \
  X(cudaErrorHostMemoryNotRegistered, 713, "pointer does not correspond to a registered memory region")       \
  X(cudaErrorLaunchFailure, 719, "unspecified launch failure")                                                \
  X(cudaErrorCooperativeLaunchTooLarge, 720, "too many blocks in cooperative launch")                         \
  X(cudaErrorNotPermitted, 800, "operation not permitted")                                                    \
  X(cudaErrorNotSupported, 801, "operation not supported")                                                    \
  X(cudaErrorSystemNotReady, 802, "system not yet initialized")                                               \
  X(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")               \
  X(cudaErrorStreamCaptureInvalidated, 901, "operation failed due to a previous error during capture")        \
  X(cudaErrorStreamCaptureMerge, 902, "operation would result in a merge of separate capture sequences")      \
  X(cudaErrorStreamCaptureUnmatched, 903, "capture was not ended in the same stream as it began")             \
  X(cudaErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work")                                \
  X(cudaErrorStreamCaptureIsolation, 905, "dependency created on uncaptured work in another stream")          \
  X(cudaErrorStreamCaptureImplicit, 906,                                                                      \
    "operation would make the legacy stream depend on a capturing blocking stream")                           \
  X(cudaErrorCapturedEvent, 907, "operation not permitted on an event last recorded in a capturing stream")   \
  X(cudaErrorStreamCaptureWrongThread, 908,                                                                   \
    "attempt to terminate a thread-local capture sequence from another thread")                               \
  X(cudaErrorUnknown, 999, "unknown error")

enum cudaError {
#define RINGCOMM_ENTRY(name, value, text) name = value,
  RINGCOMM_CUDA_ERRORS(RINGCOMM_ENTRY)
#undef RINGCOMM_ENTRY
};
using cudaError_t = cudaError;

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
using cudaGraphNode_t = struct CUgraphNode_st*;
using cudaHostFn_t = void (*)(void* user_data);

#define cudaStreamLegacy (reinterpret_cast<cudaStream_t>(1))

enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2, cudaEventInterprocess = 4 };
enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaHostAllocWriteCombined = 4 };
enum { cudaHostRegisterDefault = 0, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
enum { cudaIpcMemLazyEnablePeerAccess = 1 };
enum cudaMemoryType {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
  cudaMemoryTypeManaged = 3
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4
};
enum { cudaMemcpyFlagDefault = 0, cudaMemcpyFlagPreferOverlapWithCompute = 1 };
enum cudaMemcpySrcAccessOrder {
  cudaMemcpySrcAccessOrderInvalid = 0,
  cudaMemcpySrcAccessOrderStream = 1,
  cudaMemcpySrcAccessOrderDuringApiCall = 2,
  cudaMemcpySrcAccessOrderAny = 3
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2
};
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2
};
enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMaxRegistersPerBlock = 12,
  cudaDevAttrClockRate = 13,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrIntegrated = 18,
  cudaDevAttrCanMapHostMemory = 19,
  cudaDevAttrComputeMode = 20,
  cudaDevAttrConcurrentKernels = 31,
  cudaDevAttrPciBusId = 33,
  cudaDevAttrPciDeviceId = 34,
  cudaDevAttrMemoryClockRate = 36,
  cudaDevAttrGlobalMemoryBusWidth = 37,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrUnifiedAddressing = 41,
  cudaDevAttrPciDomainId = 50,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrManagedMemory = 83,
  cudaDevAttrHostNativeAtomicSupported = 86,
  cudaDevAttrPageableMemoryAccess = 88,
  cudaDevAttrCanUseHostPointerForRegisteredMem = 91,
  cudaDevAttrCooperativeLaunch = 95,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrMaxBlocksPerMultiprocessor = 106,
  cudaDevAttrMpsEnabled = 133
};
enum cudaDeviceP2PAttr {
  cudaDevP2PAttrPerformanceRank = 1,
  cudaDevP2PAttrAccessSupported = 2,
  cudaDevP2PAttrNativeAtomicSupported = 3,
  cudaDevP2PAttrCudaArrayAccessSupported = 4
};
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
  cudaDriverEntryPointVersionNotSufficent = 2
};
enum { cudaEnableDefault = 0 };

struct cudaUUID_t {
  char bytes[16];
};
struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  std::size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerMultiprocessor, sharedMemPerBlockOptin;
  int regsPerBlock, regsPerMultiprocessor, warpSize;
  int maxThreadsPerBlock, maxThreadsPerMultiProcessor, maxBlocksPerMultiProcessor;
  int maxThreadsDim[3], maxGridSize[3];
  int major, minor, multiProcessorCount, l2CacheSize, memoryBusWidth;
  int integrated, canMapHostMemory, concurrentKernels, asyncEngineCount, unifiedAddressing, managedMemory;
  int pageableMemoryAccess, hostNativeAtomicSupported, cooperativeLaunch, ipcEventSupported;
  int pciBusID, pciDeviceID, pciDomainID;
};
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void *devicePointer, *hostPointer;
};
struct cudaFuncAttributes {
  std::size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, maxDynamicSharedSizeBytes;
};
struct cudaMemLocation {
  int type, id;
};
struct cudaMemcpyAttributes {
  cudaMemcpySrcAccessOrder srcAccessOrder;
  cudaMemLocation srcLocHint, dstLocHint;
  unsigned flags;
};
struct cudaIpcMemHandle_t {
  char reserved[64];
};

// ---- errors, devices ------------------------------------------------------------------------------------------------

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaFree(void* memory);  // cudaFree(nullptr) is how programs ask for a context
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceGetPCIBusId(char* id, int nbytes, int device);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int from, int to);
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result = nullptr);
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result = nullptr);

// ---- memory ---------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** memory, std::size_t nbytes);
template <typename T>
cudaError_t cudaMalloc(T** memory, std::size_t nbytes) {
  return cudaMalloc(reinterpret_cast<void**>(memory), nbytes);
}
cudaError_t cudaHostAlloc(void** memory, std::size_t nbytes, unsigned flags);
template <typename T>
cudaError_t cudaHostAlloc(T** memory, std::size_t nbytes, unsigned flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(memory), nbytes, flags);
}
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaHostGetDevicePointer(void** on_device, void* on_host, unsigned flags);
template <typename T>
cudaError_t cudaHostGetDevicePointer(T** on_device, void* on_host, unsigned flags) {
  return cudaHostGetDevicePointer(reinterpret_cast<void**>(on_device), on_host, flags);
}
cudaError_t cudaHostRegister(void* memory, std::size_t nbytes, unsigned flags);
cudaError_t cudaHostUnregister(void* memory);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory);
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void* memory);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t nbytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t nbytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, std::size_t nbytes,
                                cudaStream_t stream = nullptr);
// Copies in a fixed order, which is not that of the array. Accepts only one entry of attributes.
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* nbytes, std::size_t count,
                                 cudaMemcpyAttributes* attributes, std::size_t* first_of_attributes,
                                 std::size_t num_attributes, cudaStream_t stream);
cudaError_t cudaMemset(void* memory, int value, std::size_t nbytes);
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t nbytes, cudaStream_t stream = nullptr);

// ---- streams, events ------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* user_data);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end);

// ---- graphs: only captured ones; branches that a capture forked run side by side again ------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
// Of the outputs of the real function it gives only `id`; the others must be left out.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id = nullptr);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count);  // the count only

// ---- kernels: any function pointer is one ---------------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int block_threads,
                                                          std::size_t dynamic_shared);

// ---- the driver's contexts ------------------------------------------------------------------------------------------

struct CUctx_st {
  int device = 0;
  bool primary = true;  // what the runtime makes and works in; a program's own one is {device, false}
};
using CUcontext = CUctx_st*;
using CUdevice = int;
using CUresult = cudaError;  // the numbers are the same

CUresult cuCtxGetCurrent(CUcontext* context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuDeviceGet(CUdevice* device, int index);
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device);

// ---- the driver's virtual memory, and its facts about an address (vmm.cpp) ------------------------------------------

using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
enum CUdevice_attribute { CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103 };
enum CUmemAllocationType { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum CUmemAllocationHandleType {
  CU_MEM_HANDLE_TYPE_NONE = 0,
  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
  CU_MEM_HANDLE_TYPE_FABRIC = 8,
};
enum CUmemLocationType { CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum CUmemAccess_flags { CU_MEM_ACCESS_FLAGS_PROT_NONE = 0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };
enum CUmemAllocationGranularity_flags { CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1 };
enum CUpointer_attribute {
  CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
  CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
  CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
  CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
};
struct CUmemLocation {
  CUmemLocationType type;
  int id;
};
struct CUmemAllocationProp {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  CUmemAccess_flags flags;
};
inline constexpr CUresult CUDA_SUCCESS = cudaSuccess;

CUresult cuGetErrorString(CUresult error, const char** text);
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device);
CUresult cuMemGetAllocationGranularity(std::size_t* nbytes, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags which);
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t nbytes, const CUmemAllocationProp* properties,
                     unsigned long long flags);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t nbytes, std::size_t alignment, CUdeviceptr hint,
                             unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr address, std::size_t nbytes);
CUresult cuMemMap(CUdeviceptr address, std::size_t nbytes, std::size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags);
CUresult cuMemUnmap(CUdeviceptr address, std::size_t nbytes);
CUresult cuMemSetAccess(CUdeviceptr address, std::size_t nbytes, const CUmemAccessDesc* accesses, std::size_t count);
CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address);
CUresult cuMemExportToShareableHandle(void* to, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* from,
                                        CUmemAllocationHandleType type);
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address);
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties, CUmemGenericAllocationHandle handle);
// Of an address that the driver does not know, all values are zero.
CUresult cuMemGetAddressRange(CUdeviceptr* base, std::size_t* nbytes, CUdeviceptr address);
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** values, CUdeviceptr address);

// ---- the driver's stream operations on 32-bit words: write, and wait until at least a value -------------------------

using cuuint32_t = std::uint32_t;
using cuuint64_t = std::uint64_t;
enum CUstreamBatchMemOpType { CU_STREAM_MEM_OP_WAIT_VALUE_32 = 1, CU_STREAM_MEM_OP_WRITE_VALUE_32 = 2 };
enum { CU_STREAM_WAIT_VALUE_GEQ = 0, CU_STREAM_WRITE_VALUE_DEFAULT = 0 };
union CUstreamBatchMemOpParams {
  CUstreamBatchMemOpType operation;
  struct {
    CUstreamBatchMemOpType operation;
    CUdeviceptr address;
    union {
      cuuint32_t value;
      cuuint64_t value64;
    };
    unsigned flags;
    CUdeviceptr alias;
  } waitValue, writeValue;
  cuuint64_t pad[6];
};

CUresult cuStreamBatchMemOp(cudaStream_t stream, unsigned count, CUstreamBatchMemOpParams* operations, unsigned flags);

namespace ringcomm::emulator {

// Calls of this API and of the driver that this process has made: what a collective costs the host.
long calls_so_far();

// Whether the device has its primary context: a thread has chosen it, asked for it, or worked on it as its usual one.
bool has_context(int device);

cudaError_t launch_body(const char* name, Body body, dim3 grid, dim3 block, cudaStream_t stream, bool cooperative);

// Cooperative: all blocks are on the device together, or the launch is refused.
template <typename Args>
cudaError_t launch(void (*kernel)(Args), const char* name, dim3 grid, dim3 block, const std::decay_t<Args>& args,
                   cudaStream_t stream, bool cooperative) {
  return launch_body(name, kernel ? make_body(kernel, args) : Body{}, grid, block, stream, cooperative);
}

}  // namespace ringcomm::emulator
