// One NCCL communicator of a rank. It is non-blocking, so its calls do not wait for other ranks; completion is polled
// for here, with a limit, so that an abort always succeeds.
#pragma once

#include <mutex>
#include <optional>
#include <string>

#include "hierarchy/nccl/abort_state.h"
#include "hierarchy/nccl/device.h"
#include "hierarchy/nccl/library.h"

namespace ringcomm::nccl {

// The only rank in the messages of a round; -1: there are several.
int only_peer(const Round& round);
// Returns for instance "1 message to rank 2, 2 from ranks 2 and 3".
std::string text_of(const Round& round);

class Communicator {
 public:
  // Makes a communicator of all ranks, each of which passes the same id. Throws kTimeout, kSystem.
  Communicator(const Library& library, const AbortState& abort_state, const Place& place, const std::string& id,
               TransportClock::time_point limit);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Enqueues the messages of a round as one group. The first round with a peer blocks until the peer has reached it
  // too. Throws TransportFailure.
  void group(const Round& round, cudaStream_t stream, TransportClock::time_point limit);
  // The same in two steps: the round has been enqueued once `settled` returns true, and no other group may begin
  // before.
  void begin(const Round& round, cudaStream_t stream);
  bool settled(const Round& round);

  // Returns an error that NCCL has detected by itself; nothing if the communicator is busy.
  std::optional<TransportFailure> trouble();

  // Closes it, after all sent data has been delivered. Returns false if that was not done within `limit`; then abort
  // it.
  bool close(TransportClock::time_point limit);
  // Ends its kernels; local. Idempotent.
  void abort();

 private:
  [[noreturn]] void lose(const char* call, int peer, Result result) const;
  Result state();

  const Library& library_;
  const AbortState& abort_state_;
  const Place place_;
  std::mutex turn_;   // for one group at a time
  std::mutex mutex_;  // for calls on comm_, which are short
  Comm comm_ = nullptr;
};

}  // namespace ringcomm::nccl
