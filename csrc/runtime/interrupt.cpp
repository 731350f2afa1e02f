#include "runtime/interrupt.h"

#include <atomic>

namespace ringcomm {

namespace {
std::atomic<bool (*)()> handles_signals{nullptr}, handle_signals{nullptr};
std::atomic<ThreadSource> threads{nullptr};
}  // namespace

void set_signal_source(bool (*handles)(), bool (*handle)()) {
  handles_signals.store(handles, std::memory_order_release);
  handle_signals.store(handle, std::memory_order_release);
}

bool interruptible() {
  bool (*const handles)() = handles_signals.load(std::memory_order_acquire);
  return handles && handles();
}

bool interrupted() {
  bool (*const handle)() = handle_signals.load(std::memory_order_acquire);
  return handle && handle();
}

void set_thread_source(ThreadSource source) { threads.store(source, std::memory_order_release); }

bool has_only_threads(const std::vector<std::uint64_t>& idents) {
  const ThreadSource source = threads.load(std::memory_order_acquire);
  return !source || source(idents);
}

}  // namespace ringcomm
