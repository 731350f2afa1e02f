// One NCCL communicator of a rank. Its calls wait for no other rank (it is a non-blocking one): what must wait is
// polled for here, with a limit, so that an abort always gets through.
#pragma once

#include <mutex>
#include <optional>
#include <string>

#include "nccl/device.h"
#include "nccl/fate.h"
#include "nccl/library.h"

namespace ringcomm::nccl {

struct Place {
  int device, rank, world_size;
};

// The one rank that a round is shared with; -1: several.
int only_peer(const Round& round);
// "1 message to rank 2, 2 from ranks 2 and 3"
std::string text_of(const Round& round);

class Communicator {
 public:
  // Of all ranks, each with the same id. Throws kTimeout, kSystem.
  Communicator(const Library& library, const Fate& fate, const Place& place, const std::string& id,
               WireClock::time_point limit);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Enqueues the messages of a round as one group. The first round with a peer blocks until the peer has come to it
  // too. Throws WireFailure.
  void group(const Round& round, cudaStream_t stream, WireClock::time_point limit);
  // The same in two steps: what was begun has been enqueued once `settled` says so, and nothing else may come between.
  void begin(const Round& round, cudaStream_t stream);
  bool settled(const Round& round);

  // What NCCL found out by itself; nothing if the communicator is busy.
  std::optional<WireFailure> trouble();

  // Lets go of it: what was sent is delivered first. False: not by `limit`; abort it then.
  bool close(WireClock::time_point limit);
  // Ends its kernels, local. Idempotent.
  void abort();

 private:
  [[noreturn]] void lose(const char* call, int peer, Result result) const;
  Result state();

  const Library& library_;
  const Fate& fate_;
  const Place place_;
  std::mutex turn_;   // of one group after the other
  std::mutex mutex_;  // of calls on comm_, each of which is short
  Comm comm_ = nullptr;
};

}  // namespace ringcomm::nccl
