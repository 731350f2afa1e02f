#include "fibers_state.h"

// There if the program is linked with a sanitizer.
extern "C" {
#define RINGCOMM_WEAK __attribute__((weak))
RINGCOMM_WEAK void* __tsan_get_current_fiber();
RINGCOMM_WEAK void* __tsan_create_fiber(unsigned flags);
RINGCOMM_WEAK void __tsan_destroy_fiber(void* fiber);
RINGCOMM_WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
RINGCOMM_WEAK void __tsan_acquire(void* address);
RINGCOMM_WEAK void __tsan_release(void* address);
RINGCOMM_WEAK void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, std::size_t nbytes);
RINGCOMM_WEAK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, std::size_t* nbytes);
RINGCOMM_WEAK void __asan_poison_memory_region(const volatile void* address, std::size_t nbytes);
RINGCOMM_WEAK void __asan_unpoison_memory_region(const volatile void* address, std::size_t nbytes);
}

namespace ringcomm::emulator {
namespace {

constexpr unsigned kNoSync = 1;  // __tsan_switch_to_fiber: a switch orders nothing

}  // namespace

bool tsan() { return __tsan_create_fiber != nullptr; }
bool asan() { return __sanitizer_start_switch_fiber != nullptr && __asan_poison_memory_region != nullptr; }

void* this_context() { return tsan() ? __tsan_get_current_fiber() : nullptr; }
void switch_context(void* context) {
  if (tsan()) __tsan_switch_to_fiber(context, kNoSync);
}
void leave_stack(void** fake_stack, const void* to, std::size_t nbytes) {
  if (asan()) __sanitizer_start_switch_fiber(fake_stack, to, nbytes);
}
void enter_stack(void* fake_stack, const void** from, std::size_t* nbytes) {
  if (asan()) __sanitizer_finish_switch_fiber(fake_stack, from, nbytes);
}

void* new_context() { return tsan() ? __tsan_create_fiber(0) : nullptr; }
void free_context(void* context) {
  if (context) __tsan_destroy_fiber(context);
}
void in_context(void* context, void (*call)(void*), void* argument) {
  void* const here = this_context();
  switch_context(context);
  call(argument);
  switch_context(here);
}
void release(void* address) {
  if (tsan()) __tsan_release(address);
}
void acquire(void* address) {
  if (tsan()) __tsan_acquire(address);
}
void poison(void* address, std::size_t nbytes) {
  if (asan()) __asan_poison_memory_region(address, nbytes);
}
void unpoison(void* address, std::size_t nbytes) {
  if (asan()) __asan_unpoison_memory_region(address, nbytes);
}

}  // namespace ringcomm::emulator
