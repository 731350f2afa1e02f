// The thread that watches the work that a transport has enqueued: it notices the end, and a time limit that has passed.
#pragma once

#include <condition_variable>
#include <list>
#include <thread>

#include "hierarchy/nccl/communicator.h"

namespace ringcomm::nccl {

// Work enqueued between two points of a stream.
struct WatchedWork {
  StreamEventPtr begun, ended;
  std::int64_t limit_ms = 0;  // from the time at which the stream reaches `begun`
  bool is_transfer = false;
  int peer = -1;
  std::string what;                   // "1 message to rank 2, 1 from rank 3"
  std::function<void()> on_end = {};  // called in the watcher's thread, unless the transport has ended before
  TransportClock::time_point late = TransportClock::time_point::max();
};

class Watcher : public std::enable_shared_from_this<Watcher> {
 public:
  // `tick` runs in the thread regularly while there is work to watch or `tick` returns true.
  Watcher(const Place& place, std::shared_ptr<AbortState> abort_state, std::function<bool()> tick);
  ~Watcher() { stop(); }

  void watch(WatchedWork watched);
  // Calls `look` in the thread regularly until it returns true.
  void call_back(std::function<bool()> look);
  // Makes the thread call `tick`.
  void wake();
  // Whether all watched work has ended.
  bool idle() const;
  // Ends the thread, after a last call of the callbacks; work that is still watched is forgotten. Afterwards `tick`
  // does not run any more, unless `tick` itself calls this.
  void stop();
  bool runs_this_thread() const { return id_.load() == std::this_thread::get_id(); }

 private:
  void run();
  void sweep();
  bool is_over(WatchedWork& watched);
  void report_late(const std::list<WatchedWork>& all);
  void look_back();

  const Place place_;
  const std::shared_ptr<AbortState> abort_state_;
  const std::function<bool()> tick_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::list<WatchedWork> all_;
  std::list<std::function<bool()>> looks_;
  std::thread thread_;
  std::atomic<std::thread::id> id_{};
  bool stopping_ = false, awake_ = false, sweeping_ = false;
};

}  // namespace ringcomm::nccl
