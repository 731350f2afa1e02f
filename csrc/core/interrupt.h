// Ctrl-C, and whatever else the user's language makes of a signal, while a call waits; and its threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace ringcomm {

struct InterruptSource {
  // Whether handlers of signals run in this thread.
  bool (*handles)();
  // Lets the handlers of signals run that came to this thread; true: one of them wants the call to end, by an exception
  // that is raised where the call was made.
  bool (*handle)();
};
// Set by the floor that knows the user's language; `source` lives for ever.
void set_interrupt_source(const InterruptSource* source);
bool interruptible();
// For every wait to ask now and then.
bool interrupted();

// The waits of one communicator, which look for signals.
class SignalHandling {
 public:
  bool interrupted() {
    if (!interruptible()) return false;  // the other threads of this communicator wait here too
    const bool outer = running_.exchange(true, std::memory_order_relaxed);
    const bool ends = ringcomm::interrupted();
    running_.store(outer, std::memory_order_relaxed);
    return ends;
  }
  // Whether this code is called by a handler that one of these waits lets run.
  bool runs_this() const { return running_.load(std::memory_order_relaxed) && interruptible(); }

 private:
  std::atomic<bool> running_{false};
};

// Whether no thread of the user's language but `known` ones (by pthread_self) can make a call. It may say no where it
// does not know.
using ThreadSource = bool (*)(const std::vector<std::uint64_t>& known);
void set_thread_source(ThreadSource source);
// True where no user's language is known.
bool has_only_threads(const std::vector<std::uint64_t>& known);

}  // namespace ringcomm
