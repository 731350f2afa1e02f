// A transport over send and receive of any backend of torch.distributed, such as Gloo, for host memory.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "hierarchy/transport.h"

namespace ringcomm {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using GroupWork = c10::intrusive_ptr<c10d::Work>;

// Sends and receives in flight, which an abort ends.
class GroupLink {
 public:
  GroupLink(BackendPtr backend, int first_tag) : backend_(std::move(backend)), first_tag_(first_tag) {}

  // The uses of the backend's tags, counted from `first_tag`.
  static constexpr int kSignature = 0, kHeader = 1, kPayload = 2, kFirstSlot = 8;

  GroupWork send(const Message& message, int tag);
  GroupWork recv(const Message& message, int tag);
  // Blocks until the work is done. Throws TransportFailure; after a time limit has passed, the backend may be unusable.
  void wait(const GroupWork& work, int peer, TransportClock::time_point limit);
  void abort();
  bool aborted() const { return aborted_.load(); }
  std::uint64_t sent_bytes() const { return sent_bytes_.load(); }

 private:
  [[noreturn]] void refuse(int peer) const;

  const BackendPtr backend_;
  const int first_tag_;
  std::atomic<bool> aborted_{false};
  std::atomic<std::uint64_t> sent_bytes_{0};
  std::mutex mutex_;
  std::set<GroupWork> waited_for_;
};

// `name`: the backend's name in messages; `first_tag`: this transport uses kTags tags of the backend from there on.
inline constexpr int kTags = 4096;
std::shared_ptr<Transport> make_group_transport(BackendPtr backend, std::string name, int first_tag);

}  // namespace ringcomm
