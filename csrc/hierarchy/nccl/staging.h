// Memory for the exchange of signatures: this rank's signatures, followed by room for those of the peers, on the host
// and on the device.
#pragma once

#include <list>

#include "hierarchy/nccl/device.h"

namespace ringcomm::nccl {

class Staging {
 public:
  Staging(std::size_t nbytes, int rank);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  std::size_t nbytes() const { return nbytes_; }  // of each of the two
  char* host() const { return host_; }
  char* device() const { return device_; }

 private:
  const std::size_t nbytes_;
  char *host_ = nullptr, *device_ = nullptr;
};

// A pool, since an allocation during a call may wait for the device's work.
class Stagings {
 public:
  Stagings(int device, int rank);
  ~Stagings();
  // Returns one of at least `nbytes`; the device must be the current one.
  Staging* take(std::size_t nbytes);
  void put_back(Staging* staging);

 private:
  const int device_, rank_;
  std::mutex mutex_;
  std::list<Staging> all_;
  std::vector<Staging*> idle_;
};

}  // namespace ringcomm::nccl
