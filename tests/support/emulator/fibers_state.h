// The inside of the scheduler. The fibers*.cpp are compiled WITHOUT -fsanitize=thread, even if the rest has it.
#pragma once

#include "fibers.h"

#if !defined(__x86_64__)
#error "the emulator switches stacks in x86-64 assembly; on other machines build with RINGCOMM_EMULATE=OFF"
#endif
#if defined(__SANITIZE_THREAD__)
#error "compile fibers*.cpp with -fno-sanitize=thread: they tell ThreadSanitizer about the fibers by hand"
#endif

namespace ringcomm::emulator {

constexpr std::size_t kSharedBytes = 48 << 10;  // of a block
constexpr int kNamedBarriers = 16, kMostShared = 64;

enum class State { kReady, kAtBarrier, kSpinning, kDone };

struct Barrier {
  Fiber* waiting = nullptr;
  int arrived = 0, expected = 0;
  unsigned generation = 0;
  bool all = true, any = false;
  bool all_of[2] = {}, any_of[2] = {};  // by generation mod 2
  char sync[2] = {};
};
struct Warp {
  Barrier in, out;
  std::uint64_t words[kWarp][2];
};
struct Fiber {
  char* stack = nullptr;
  void* context = nullptr;  // TSan's
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;  // ASan's
  Scheduler* scheduler = nullptr;
  Block* block = nullptr;
  dim3 index;
  int linear = 0;
  State state = State::kReady;
  bool ticked = false;
  char sync = 0;
  std::uint32_t priority = 0;
  const void* on = nullptr;
  const char* why = "";
  std::uint64_t detail = 0;
  Fiber* next = nullptr;   // in the list of a flag or a barrier
  std::uint64_t seen = 0;  // writes at the last look
};
struct SharedArena {
  char sync = 0;
  char* memory = nullptr;
};
struct Block {
  Grid* grid = nullptr;
  dim3 index;
  int live = 0, waiting = 0;  // threads; at barriers
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  Barrier barriers[kNamedBarriers];
  SharedArena* arena = nullptr;
  struct {
    const void* site;
    char* at;
  } variables[kMostShared];
  int num_variables = 0;
  std::size_t shared_used = 0;
};

// The fiber that runs in this thread. It has no wrapper around it, as a C++ thread_local would have.
extern __thread Fiber* current __attribute__((tls_model("initial-exec")));

// Functions that run on a fiber and see the inside of the scheduler.
struct Hooks {
  [[noreturn]] static void entry();
  static void to_scheduler(bool for_good = false);
  static void park_at_barrier(Barrier& barrier, const char* why, std::uint64_t detail);
  [[noreturn]] static void fail(const char* what, std::uint64_t detail, const char* then = "");
  static bool spin(const void* flag, std::uint64_t wanted);
  static void wrote(const void* flag);
  static Fiber*& spinners(Scheduler& scheduler, const void* flag);
  static unsigned preempt_every() { return current->scheduler->preempt_every_; }
  static std::uint64_t writes() { return current->scheduler->writes_; }
  static std::uint32_t random() { return current->scheduler->random(); }
  static void wake(Fiber* fiber) { fiber->scheduler->push(fiber); }
};

// ---- sanitizers: these do nothing in a build without one ------------------------------------------------------------

bool tsan();
bool asan();
void* this_context();
void switch_context(void* context);                                       // of TSan
void leave_stack(void** fake_stack, const void* to, std::size_t nbytes);  // of ASan: around a switch of stacks
void enter_stack(void* fake_stack, const void** from, std::size_t* nbytes);

}  // namespace ringcomm::emulator
