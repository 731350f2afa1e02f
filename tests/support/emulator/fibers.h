// The scheduler under the emulator: blocks of fibers, one per CUDA thread, all run by the OS thread that calls run().
//
// The fibers*.cpp are compiled WITHOUT -fsanitize=thread, even if the rest has it: they switch stacks, and tell
// ThreadSanitizer by hand what is ordered. While they run on a fiber, they use neither the heap nor a mutex, because
// these would order fibers that a device does not order.
#pragma once

#include <string>
#include <vector>

#include "emulator.h"

namespace ringcomm::emulator {

struct Block;
struct Fiber;

// One launched kernel. Its blocks become resident in order, when the owner says so. Nothing here is inline, so that
// ThreadSanitizer sees none of it.
struct Grid {
  Grid(std::string name, Body body, dim3 grid, dim3 block);
  unsigned blocks() const;
  unsigned threads() const;  // of a block
  unsigned left() const;     // blocks to start
  unsigned resident() const;
  bool finished() const;
  void before_start();  // in the caller's context: what happened so far happens before the kernel,
  void join();          // also what others did that have called before_start;
  void after_end();     // and what the kernel did, before what comes now

  const std::string name;
  const Body body;
  const dim3 grid, block;
  unsigned started = 0, ended = 0;  // blocks
  char begin_sync = 0, end_sync = 0;
};

class Scheduler {
 public:
  Scheduler(std::uint64_t seed, unsigned preempt_every);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  enum class Pause { kParked, kBlockEnded, kBudget, kFailed };
  void start_block(Grid* grid);
  // Runs fibers until all of them wait, a block has ended, `budget` switches are done, or a kernel went wrong.
  Pause run(std::uint64_t budget);
  bool wake_spinners();  // every spinning fiber looks again, at the clock too. False: there is none
  bool has_blocks() const { return !blocks_.empty(); }
  std::uint64_t writes() const { return writes_; }
  std::uint64_t switches() const { return switches_; }

  // After kFailed: what went wrong, and in which kernel.
  const std::string& failure() const { return failure_; }
  Grid* failed_grid() const { return failed_; }
  std::string who_waits() const;  // one line for each kind of wait
  void abandon(Grid* grid);       // its fibers never run again

 private:
  friend struct Hooks;
  void push(Fiber* fiber);
  Fiber* pick();
  void switch_to(Fiber* fiber);
  void end_block(Block* block);
  std::uint32_t random();

  std::uint64_t rng_;
  const bool in_order_, by_priority_;
  const unsigned preempt_every_;
  std::vector<Fiber*> ready_;  // a ring of `count_` fibers from `first_` on
  std::size_t first_ = 0, count_ = 0, live_ = 0;
  Fiber* spinning_[256] = {};
  std::vector<Block*> blocks_;
  std::uint64_t writes_ = 0, switches_ = 0;
  struct {
    const char *what, *then;
    std::uint64_t detail;
  } complaint_ = {};  // of a fiber that found something wrong
  Grid* failed_ = nullptr;
  std::string failure_;
  void *main_stack_pointer_ = nullptr, *main_context_ = nullptr, *main_fake_stack_ = nullptr;
  const void* main_stack_ = nullptr;
  std::size_t main_stack_bytes_ = 0;
};

// Contexts that ThreadSanitizer takes for threads: the streams of an emulated GPU. Without TSan these do nothing.
void* new_context();
void free_context(void* context);
void in_context(void* context, void (*call)(void*), void* argument);
void release(void* address);  // what happened so far in this context happens before ...
void acquire(void* address);  // ... what follows this in another
// AddressSanitizer's red zones by hand.
void poison(void* address, std::size_t nbytes);
void unpoison(void* address, std::size_t nbytes);

}  // namespace ringcomm::emulator
