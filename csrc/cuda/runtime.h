// The CUDA runtime as the rest of the engine uses it: errors become Error, the current device is restored, and a device
// can describe itself.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

namespace ringcomm::cuda {

// Throws unless `status` is success. `what` names the call in the error: "cudaMalloc of the segment". Clears
// the runtime's last error, so that no later call is blamed for this one.
void check(cudaError_t status, const char* what, int rank);

// For destructors: true if `status` is success or says that the process is ending. Other errors are printed once,
// because nothing can catch them.
bool tolerate(cudaError_t status, const char* what) noexcept;

// Whether static objects are being destroyed already: CUDA must not be called any more.
bool process_is_ending();

// A function of the driver, by the version that it had in CUDA 12.0; null: the driver does not have it.
#if defined(RINGCOMM_EMULATE)
#define RINGCOMM_DRIVER(function) &function
#else
void* driver_function(const char* symbol);
#define RINGCOMM_DRIVER(function) reinterpret_cast<decltype(&function)>(driver_function(#function))
#endif

// Within its scope the calling thread works in the primary context of `device`, as the runtime and torch do. Afterwards
// the thread has its previous context again: none, or one that the program has made current (cuCtxSetCurrent, as CuPy
// and green contexts do). cudaSetDevice would replace that context; and for a thread that has none it would make one,
// of about 500 MB, on the usual GPU 0.
class DeviceGuard {
 public:
  DeviceGuard(int device, int rank);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  void* before_ = nullptr;  // a CUcontext
  bool changed_ = false;
};

// Within its scope the calling thread may allocate and query, whatever other threads are capturing into a graph.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(int rank);
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode before_ = cudaStreamCaptureModeRelaxed;
};

// Both: the calling thread uses `device`, and may allocate and query even while other threads capture graphs.
class DeviceScope {
 public:
  DeviceScope(int device, int rank) : device_(device, rank), relaxed_(rank) {}

 private:
  const DeviceGuard device_;
  const RelaxedCapture relaxed_;
};

struct DeviceFacts {
  std::string name;
  std::string bus_id;  // 0000:3b:00.0
  std::string uuid;    // 32 hexadecimal digits; tells MIG instances apart, which share a bus id
  int multiprocessors = 0;
  int major = 0, minor = 0;  // compute capability
  bool mps = false;          // processes share the device at the same time (Multi-Process Service)
  std::size_t memory_bytes = 0;
  std::size_t l2_bytes = 0;

  std::string text() const;  // "NVIDIA H200, 132 SMs, sm_90, 139.8 GiB, L2 50.0 MiB, 0000:3b:00.0"
};
DeviceFacts facts_of(int device, int rank);

}  // namespace ringcomm::cuda
