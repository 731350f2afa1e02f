// Lets signal handlers of the user's language run, such as for Ctrl-C, while a call waits; and knows whether other
// threads of that language can make calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace ringcomm {

// Set by the binding to the user's language. `handles` returns whether signal handlers run in this thread. `handle`
// runs the handlers of pending signals of this thread; it returns true if one of them wants the call to end, by an
// exception that is raised where the call was made.
void set_signal_source(bool (*handles)(), bool (*handle)());
bool interruptible();
// Every wait polls this regularly.
bool interrupted();

// Polls for signals in the waits of one communicator.
class SignalHandling {
 public:
  bool interrupted() {
    if (!interruptible()) return false;  // other threads of this communicator also poll here
    const bool outer = running_.exchange(true, std::memory_order_relaxed);
    const bool ends = ringcomm::interrupted();
    running_.store(outer, std::memory_order_relaxed);
    return ends;
  }
  // Whether the caller runs inside a signal handler that one of these waits has called.
  bool runs_this() const { return running_.load(std::memory_order_relaxed) && interruptible(); }

 private:
  std::atomic<bool> running_{false};
};

// Returns whether the `known` threads (by pthread_self) are the only threads of the user's language that can make a
// call; false if unknown.
using ThreadSource = bool (*)(const std::vector<std::uint64_t>& known);
void set_thread_source(ThreadSource source);
// Returns true if no source is set.
bool has_only_threads(const std::vector<std::uint64_t>& known);

}  // namespace ringcomm
