// The state that the parts of one rank's engine share: its memory, its limits and its end. And the state that the ranks
// of one communicator in this process share.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/launch/stream_waits.h"
#include "cuda/memory/peer_memory.h"
#include "cuda/streams/events.h"
#include "cuda/streams/pending_call.h"
#include "cuda/streams/status.h"
#include "cuda/tuning/plan.h"

namespace ringcomm::cuda {

class LocalGroup;
class Matcher;

// The state that the ranks of one communicator in this process share.
class SharedState {
 public:
  static std::shared_ptr<SharedState> of(const std::string& identity);
  ~SharedState();

  AbortState abort_state;
  // The ranks in `memory.local_ranks()`, which share a device.
  std::shared_ptr<LocalGroup> local_group(const PeerMemory& memory);
  Matcher& matcher() { return *matcher_; }
  // Wakes all threads that wait on the host, because the communicator has ended.
  void end_all();

 private:
  explicit SharedState(std::string identity);

  const std::string identity_;
  std::unique_ptr<Matcher> matcher_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<LocalGroup>> local_groups_;  // by device
};

class Context {
 public:
  Context(int rank, int world_size, const EngineOptions& options);

  PeerMemory& peer_memory() const { return *peer_memory_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int device() const { return device_; }
  StreamEvents& events() const { return *events_; }
  // The stream for copies between devices in calls on `stream`. On the default stream CUDA lets such a copy wait for
  // all earlier work of both devices, also for kernels that wait for this rank; so it is another one, which the caller
  // forks from the default one and joins with it.
  cudaStream_t copy_stream(cudaStream_t stream) const { return is_default(stream) ? copy_stream_ : stream; }
  StreamWaits& waits() { return waits_; }
  // Whether streams of the device can wait for words in memory.
  bool has_word_ops();
  const Tuning& tuning() const { return tuning_; }
  Setting setting() const;
  SharedState& shared() const { return *shared_.load(std::memory_order_acquire); }
  void connect(const std::vector<std::string>& handles, const std::function<void()>& prepare);

  std::int64_t limit(const Call& call) const { return call.timeout_ms > 0 ? call.timeout_ms : timeout_ms.load(); }
  // From now on a failure of a kernel is reported as a failure of this call.
  void calls(Op op, std::int64_t limit) {
    last_op_.store(static_cast<int>(op), std::memory_order_relaxed);
    last_limit_.store(limit, std::memory_order_relaxed);
  }

  // Throws if the communicator has ended, or a kernel of this rank has given up.
  void check(Op op);
  bool ended() const;
  // Throws the reason for which it has ended.
  [[noreturn]] void raise_end(Op op) const;
  // Ends the communicator on all ranks. Waits until the other ranks can see it, so that the process may end; at most a
  // second.
  void abort(const std::string& reason, ErrorCode code) noexcept;
  // Does the same, and throws the error.
  [[noreturn]] void abort_and_throw(ErrorCode code, const std::string& message);

  // Blocks the host until the call is no longer open, at most until `end`; then the communicator ends. Throws the error
  // of the call.
  void await(PendingCall& pending, Op op, Clock::time_point end, std::int64_t limit);
  // Throws the error of a call that is no longer open.
  void rethrow(const PendingCall& pending, Op op);

  // Frees the memory, unless kernels may still use it; then it is never freed.
  void release_peer_memory(bool idle);

  std::atomic<std::int64_t> timeout_ms;
  std::atomic<bool> closed{false};
  std::atomic<bool> captured{false};                                // some call of this rank is in a graph
  std::atomic<std::uint64_t> copy_calls{0}, refused_copy_calls{0};  // planned for copy_engine; of these by direct
  std::shared_ptr<Flag> algorithm_counts;                           // the local group's lock is held

 private:
  const int rank_, world_size_, device_;
  const Tuning tuning_;
  const int threads_;
  const Separation apart_;
  const int usual_channels_;
  std::unique_ptr<PeerMemory> peer_memory_;
  std::shared_ptr<StreamEvents> events_;
  cudaStream_t copy_stream_ = nullptr;              // null: one launch holds all ranks
  const std::shared_ptr<SharedState> unconnected_;  // until connected
  std::shared_ptr<SharedState> connected_;
  std::atomic<SharedState*> shared_;
  std::atomic<int> last_op_{static_cast<int>(Op::kBarrier)};
  std::atomic<std::int64_t> last_limit_{0};
  std::once_flag asked_word_ops_;
  bool has_word_ops_ = false;
  StreamWaits waits_{*this};
};

}  // namespace ringcomm::cuda
