#include "runtime/interrupt.h"

#include <atomic>

namespace ringcomm {

namespace {
std::atomic<const InterruptSource*> known{nullptr};
std::atomic<ThreadSource> threads{nullptr};
}  // namespace

void set_interrupt_source(const InterruptSource* source) { known.store(source, std::memory_order_release); }

bool interruptible() {
  const InterruptSource* const source = known.load(std::memory_order_acquire);
  return source && source->handles();
}

bool interrupted() {
  const InterruptSource* const source = known.load(std::memory_order_acquire);
  return source && source->handle();
}

void set_thread_source(ThreadSource source) { threads.store(source, std::memory_order_release); }

bool has_only_threads(const std::vector<std::uint64_t>& idents) {
  const ThreadSource source = threads.load(std::memory_order_acquire);
  return !source || source(idents);
}

}  // namespace ringcomm
