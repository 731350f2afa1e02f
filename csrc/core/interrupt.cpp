#include "core/interrupt.h"

#include <atomic>

namespace ringcomm {

namespace {
std::atomic<const InterruptSource*> known{nullptr};
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

}  // namespace ringcomm
