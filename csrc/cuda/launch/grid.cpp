#include "cuda/launch/grid.h"

#include <map>
#include <mutex>
#include <tuple>

namespace ringcomm::cuda {

int room_for(const void* kernel, int threads, int device, int rank) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int>, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  int& blocks = known[{kernel, threads, device}];
  if (blocks != 0) return blocks;
  const RelaxedCapture relaxed(rank);
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes of a kernel", rank);
  int each = 0, multiprocessors = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, 0),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor of a kernel", rank);
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute of the multiprocessors", rank);
  return blocks = each * multiprocessors;
}

}  // namespace ringcomm::cuda
