// Waits of a rank's streams for words that its peers write (CopyWords). The device puts no limit on such a wait, so a
// host thread watches those under way:
//
//   the peers have not come within the limit    ends the communicator
//   the communicator has ended                  tells the peers, then writes the words itself, so that the streams go
//   on
//
// A stream that was released in this way runs through the rest of the call, and its peers take the words that it writes
// there for those of a normal call. Therefore all ranks are told first that the communicator has ended, and each stream
// copies its segment's abort flag to the host after its last wait (copy_abort_flag): a rank whose wait was ended by
// such a word finds the flag set.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "core/engine.h"
#include "cuda/streams/events.h"
#include "cuda/streams/pending_call.h"

namespace ringcomm::cuda {

class Context;

class StreamWaits {
 public:
  explicit StreamWaits(Context& context) : context_(context) {}
  ~StreamWaits() { stop(); }

  struct Wait {
    Op op;
    std::uint32_t ticket;  // value of the words
    std::int64_t limit_ms;
    StreamEventPtr begin, end;                    // around the waits
    std::optional<Clock::time_point> since = {};  // when the host saw that its stream had come to `begin`
  };
  void add(Wait wait);
  // Enqueues a copy of the abort flag to where the host looks.
  void copy_abort_flag(cudaStream_t stream) const;
  void stop();

 private:
  void run();
  void loop();
  // Whether it is over.
  bool attend(Wait& wait);
  void report_timeout(const Wait& wait);
  void release(const Wait& wait);

  Context& context_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Wait> waits_;
  std::thread thread_;
  bool stopping_ = false;
  bool released_ = false;  // of the thread alone
};

}  // namespace ringcomm::cuda
