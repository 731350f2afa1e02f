// Streams of the engine, and events: points in streams that others wait for.
#pragma once

#include <cuda_runtime.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/runtime.h"

namespace ringcomm::cuda {

// Streams of the engine, of the highest priority. They wait for other streams only explicitly, and are never destroyed:
// a returned stream is lent again.
cudaStream_t lend_stream(int device, int rank);
void take_back_stream(int device, cudaStream_t stream);

inline bool is_default(cudaStream_t stream) { return !stream || stream == cudaStreamLegacy; }
// Whether `stream` takes part in a capture, also in one that an error has invalidated.
bool is_capturing(cudaStream_t stream, int rank);
// The capture that `stream` takes part in; 0: none.
unsigned long long capture_of(cudaStream_t stream, int rank);

// A point in a stream. Work that was captured into a graph and work that runs now do not wait for each other.
struct StreamEvent {
  cudaEvent_t handle = nullptr;
  cudaStream_t stream = nullptr;
  unsigned long long capture = 0;
};
using StreamEventPtr = std::shared_ptr<const StreamEvent>;

// Whether the work before the event is done. A captured event counts as done, because its work runs when the graph is
// launched.
bool reached(const StreamEvent& event, int rank);

// Polls `done` until it returns true; yields at first, then naps. Returns false if it does not within `end`.
template <typename Done>
bool poll_until(std::chrono::steady_clock::time_point end, const Done& done) {
  constexpr int kYields = 32, kNaps = 50;  // each nap is 10 us longer than the one before, up to 500 us
  for (int idle = 0; !done(); idle = std::min(idle + 1, kYields + kNaps - 1)) {
    if (idle < kYields) {
      sched_yield();
      continue;
    }
    if (std::chrono::steady_clock::now() >= end) return false;
    usleep(10 * (idle - kYields + 1));
  }
  return true;
}

// Events of one device, which are reused.
class StreamEvents : public std::enable_shared_from_this<StreamEvents> {
 public:
  explicit StreamEvents(int device) : device_(device) {}
  ~StreamEvents();
  // Records the present point of `stream`. The device must be the current one.
  StreamEventPtr record(cudaStream_t stream, unsigned long long capture, int rank);
  // Makes work that is enqueued on `stream` from now on run after the event.
  static void follow(cudaStream_t stream, unsigned long long capture, const StreamEventPtr& event, int rank);
  // Whether a stream of the event's device is the event's own, so that no wait is needed. An equal handle proves that
  // only if streams with that handle are never destroyed, or if the stream `has_stayed` alive since the event was made.
  static bool is_of(cudaStream_t stream, const StreamEvent& event, bool has_stayed);
  // As `follow`, for a stream of the event's device.
  static void follow_here(cudaStream_t stream, unsigned long long capture, const StreamEventPtr& event, bool has_stayed,
                          int rank);

 private:
  cudaEvent_t take(int rank);

  const int device_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> idle_;
};

// The latest event of a device's streams: one of the work that runs now, and one of each capture under way. There is no
// order between these.
class LatestEvents {
 public:
  // Makes work that is enqueued on `stream` from now on run after the latest event of its own kind.
  void follow(cudaStream_t stream, unsigned long long capture, int rank) const;
  void put(const StreamEventPtr& event);
  StreamEventPtr eager() const;  // null: none

 private:
  std::map<unsigned long long, StreamEventPtr> events_;  // by capture; 0: none
};

}  // namespace ringcomm::cuda
