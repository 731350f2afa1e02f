// The thread that looks after what a wire has enqueued: sees it end, or not in time.
#pragma once

#include <condition_variable>
#include <list>
#include <thread>

#include "nccl/communicator.h"

namespace ringcomm::nccl {

// Something enqueued between two points of a stream.
struct Watched {
  Event begun, ended;
  std::int64_t limit_ms = 0;  // from `begun` on, when the stream comes there
  bool is_transfer = false;
  int peer = -1;
  std::string what;                   // "1 message to rank 2, 1 from rank 3"
  std::function<void()> on_end = {};  // in the watcher's thread; not where the wire has ended before
  WireClock::time_point late = WireClock::time_point::max();
};

class Watcher : public std::enable_shared_from_this<Watcher> {
 public:
  // `tick` runs in the thread every now and then while there is something to watch or it says so itself.
  Watcher(std::shared_ptr<Events> events, std::shared_ptr<Fate> fate, std::function<bool()> tick);
  ~Watcher() { stop(); }

  void watch(Watched watched);
  // Calls `look` in the thread now and then until it returns true.
  void call_back(std::function<bool()> look);
  // There is something for `tick` to do.
  void wake();
  // Whether everything that is watched has ended.
  bool idle() const;
  // Ends the thread, after a last look back; what is watched then is forgotten. `tick` does not run any more, unless
  // this is called by it.
  void stop();
  bool runs_this_thread() const { return id_.load() == std::this_thread::get_id(); }

 private:
  void run();
  void sweep();
  bool is_over(Watched& watched);
  void report_late(const std::list<Watched>& all);
  void look_back();

  const std::shared_ptr<Events> events_;
  const std::shared_ptr<Fate> fate_;
  const std::function<bool()> tick_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Watched> all_;
  std::list<std::function<bool()>> looks_;
  std::thread thread_;
  std::atomic<std::thread::id> id_{};
  bool stopping_ = false, awake_ = false, sweeping_ = false;
};

}  // namespace ringcomm::nccl
