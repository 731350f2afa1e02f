// Memory for terms on their way: what this rank says lies beside room for what the others say, on the host and on the
// device.
#pragma once

#include <list>

#include "nccl/device.h"

namespace ringcomm::nccl {

class Staging {
 public:
  Staging(std::size_t nbytes, int rank);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  std::size_t nbytes() const { return nbytes_; }  // of each
  char* host() const { return host_; }
  char* device() const { return device_; }

 private:
  const std::size_t nbytes_;
  char *host_ = nullptr, *device_ = nullptr;
};

// Used again and again: to allocate in the middle of a call may wait for what is on the device.
class Stagings {
 public:
  Stagings(int device, int rank);
  ~Stagings();
  // Of at least `nbytes`; the device is the current one.
  Staging* take(std::size_t nbytes);
  void put_back(Staging* staging);

 private:
  const int device_, rank_;
  std::mutex mutex_;
  std::list<Staging> all_;
  std::vector<Staging*> idle_;
};

}  // namespace ringcomm::nccl
