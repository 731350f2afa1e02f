#include "cuda/launch/grid.h"

#include <map>
#include <mutex>
#include <tuple>

namespace ringcomm::cuda {

int room_for(const void* kernel, int threads, int device, int rank) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int>, int> known;
  const std::tuple key(kernel, threads, device);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto it = known.find(key); it != known.end()) return it->second;
  }
  // Without the lock: loading may wait for a kernel that waits for another rank of this process.
  const RelaxedCapture relaxed(rank);
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes of a kernel", rank);
  int each = 0, multiprocessors = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, 0),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor of a kernel", rank);
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute of the multiprocessors", rank);
  const std::lock_guard<std::mutex> lock(mutex);
  return known[key] = each * multiprocessors;
}

}  // namespace ringcomm::cuda
