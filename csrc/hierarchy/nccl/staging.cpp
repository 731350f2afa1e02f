#include "hierarchy/nccl/staging.h"

#include <algorithm>

#include "core/error.h"

namespace ringcomm::nccl {

namespace {
constexpr std::size_t kUsualBytes = 8192;
constexpr int kAtFirst = 4;
}  // namespace

StagingBuffer::StagingBuffer(std::size_t nbytes, int rank) : nbytes_(nbytes) {
  check(cudaHostAlloc(&host_, nbytes, cudaHostAllocDefault), "cudaHostAlloc of a transport's signatures", rank);
  const cudaError_t status = cudaMalloc(&device_, nbytes);
  if (status != cudaSuccess) cudaFreeHost(host_);
  check(status, "cudaMalloc of a transport's signatures", rank);
}

StagingBuffer::~StagingBuffer() {
  cudaFreeHost(host_);
  cudaFree(device_);
}

StagingPool::StagingPool(int device, int rank) : device_(device), rank_(rank) {
  const DeviceScope on(device_, rank_);
  for (int i = 0; i < kAtFirst; ++i) idle_.push_back(&all_.emplace_back(kUsualBytes, rank_));
}

StagingPool::~StagingPool() {
  if (process_is_ending()) {
    new std::list<StagingBuffer>(std::move(all_));  // CUDA can no longer be called
    return;
  }
  try {
    const DeviceScope on(device_, rank_);
    all_.clear();
  } catch (const Error&) {
    new std::list<StagingBuffer>(std::move(all_));
  }
}

StagingBuffer* StagingPool::take(std::size_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto fits =
      std::find_if(idle_.begin(), idle_.end(), [&](const StagingBuffer* s) { return s->nbytes() >= nbytes; });
  if (fits == idle_.end()) return &all_.emplace_back(std::max(kUsualBytes, nbytes), rank_);
  StagingBuffer* const found = *fits;
  idle_.erase(fits);
  return found;
}

void StagingPool::put_back(StagingBuffer* staging) {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(staging);
}

}  // namespace ringcomm::nccl
