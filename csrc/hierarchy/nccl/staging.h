// Memory for the exchange of signatures: this rank's signatures, followed by room for those of the peers, on the host
// and on the device.
#pragma once

#include <list>

#include "hierarchy/nccl/device.h"

namespace ringcomm::nccl {

class StagingBuffer {
 public:
  StagingBuffer(std::size_t nbytes, int rank);
  ~StagingBuffer();
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  std::size_t nbytes() const { return nbytes_; }  // of each of the two
  char* host() const { return host_; }
  char* device() const { return device_; }

 private:
  const std::size_t nbytes_;
  char *host_ = nullptr, *device_ = nullptr;
};

// A pool, since an allocation during a call may wait for the device's work.
class StagingPool {
 public:
  StagingPool(int device, int rank);
  ~StagingPool();
  // Returns one of at least `nbytes`; the device must be the current one.
  StagingBuffer* take(std::size_t nbytes);
  void put_back(StagingBuffer* staging);

 private:
  const int device_, rank_;
  std::mutex mutex_;
  std::list<StagingBuffer> all_;
  std::vector<StagingBuffer*> idle_;
};

}  // namespace ringcomm::nccl
