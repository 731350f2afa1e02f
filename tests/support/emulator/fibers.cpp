#include "fibers.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

#include "fibers_state.h"

extern "C" {
// Saves the callee-saved registers on this stack and its pointer in *save, and continues where `load` had stopped.
void ringcomm_switch_stack(void** save, void* load);
}
asm(R"(
.text
.globl ringcomm_switch_stack
.hidden ringcomm_switch_stack
.type ringcomm_switch_stack,@function
ringcomm_switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size ringcomm_switch_stack,.-ringcomm_switch_stack
)");

namespace ringcomm::emulator {

__thread Fiber* current = nullptr;

namespace {

constexpr std::size_t kGuardBytes = 4096;
constexpr std::size_t kCandidates = 128;  // among so many the highest priority is sought

std::size_t stack_bytes() { return (tsan() || asan() ? 256 : 64) << 10; }

// Stacks, TSan contexts and shared memory are expensive to make, so they are reused.
struct Pool {
  std::mutex mutex;
  std::vector<Fiber*> fibers;
  std::vector<SharedArena*> arenas;
};
Pool& pool() {
  static Pool* const p = new Pool;  // never destroyed: the emulated GPU outlives static objects
  return *p;
}

char* map_memory(std::size_t nbytes) {
  void* const memory =
      mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory != MAP_FAILED) return static_cast<char*>(memory);
  std::fprintf(stderr, "ringcomm emulator: cannot map %zu bytes for the stacks of CUDA threads\n", nbytes);
  std::abort();
}
void make_fibers(std::vector<Fiber*>& free) {
  constexpr int kTogether = 64;
  const std::size_t each = stack_bytes() + kGuardBytes;
  char* const memory = map_memory(kTogether * each);
  for (int i = 0; i < kTogether; ++i) {
    auto* fiber = new Fiber;
    fiber->stack = memory + i * each + kGuardBytes;
    mprotect(memory + i * each, kGuardBytes, PROT_NONE);
    release(&fiber->sync);  // whoever maps memory counts as its writer
    free.push_back(fiber);
  }
}
void take_fibers(int count, std::vector<Fiber*>& taken) {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  for (int i = 0; i < count; ++i) {
    if (p.fibers.empty()) make_fibers(p.fibers);
    Fiber* const fiber = p.fibers.back();
    p.fibers.pop_back();
    if (!fiber->context) fiber->context = new_context();
    unpoison(fiber->stack, stack_bytes());
    taken.push_back(fiber);
  }
}
void give_back(const std::vector<Fiber*>& fibers, SharedArena* arena) {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  p.fibers.insert(p.fibers.end(), fibers.begin(), fibers.end());
  p.arenas.push_back(arena);
}
// As if the fiber had been switched away at the entry of its function.
void prepare_stack(Fiber* fiber, void (*entry)()) {
  void** top = reinterpret_cast<void**>(fiber->stack + stack_bytes());
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;  // the saved registers
  fiber->stack_pointer = top;
}
SharedArena* take_arena() {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  if (p.arenas.empty()) {
    p.arenas.push_back(new SharedArena);
    p.arenas.back()->memory = map_memory(kSharedBytes);
    release(&p.arenas.back()->sync);  // as above
  }
  SharedArena* const arena = p.arenas.back();
  p.arenas.pop_back();
  return arena;
}

}  // namespace

void Hooks::entry() {
  Fiber* const self = current;
  Scheduler& scheduler = *self->scheduler;
  enter_stack(nullptr, &scheduler.main_stack_, &scheduler.main_stack_bytes_);
  Grid& grid = *self->block->grid;
  char* const arena_sync = &self->block->arena->sync;
  acquire(&self->sync);
  acquire(&grid.begin_sync);
  acquire(arena_sync);
  grid.body.call(grid.body.closure.get());
  release(arena_sync);
  release(&grid.end_sync);
  self->state = State::kDone;
  to_scheduler(true);
  std::abort();
}

void Hooks::to_scheduler(bool for_good) {
  Fiber* const self = current;
  Scheduler& scheduler = *self->scheduler;
  switch_context(scheduler.main_context_);
  leave_stack(for_good ? nullptr : &self->fake_stack, scheduler.main_stack_, scheduler.main_stack_bytes_);
  ringcomm_switch_stack(&self->stack_pointer, scheduler.main_stack_pointer_);
  enter_stack(self->fake_stack, &scheduler.main_stack_, &scheduler.main_stack_bytes_);
}

// The message is put into words later: a fiber must not write to the scheduler's memory by library calls, because
// ThreadSanitizer sees those.
void Hooks::fail(const char* what, std::uint64_t detail, const char* then) {
  current->scheduler->complaint_ = {what, then, detail};
  current->scheduler->failed_ = current->block->grid;
  current->state = State::kAtBarrier;
  current->why = "went wrong";
  to_scheduler();
  std::abort();
}

void Hooks::park_at_barrier(Barrier& barrier, const char* why, std::uint64_t detail) {
  current->state = State::kAtBarrier;
  current->why = why;
  current->detail = detail;
  current->next = barrier.waiting;
  barrier.waiting = current;
  ++current->block->waiting;
  to_scheduler();
}

Fiber*& Hooks::spinners(Scheduler& scheduler, const void* flag) {
  return scheduler.spinning_[(reinterpret_cast<std::uintptr_t>(flag) >> 3) * 0x9e3779b1u >> 16 & 255];
}

bool Hooks::spin(const void* flag, std::uint64_t wanted) {
  Scheduler& scheduler = *current->scheduler;
  if (current->seen != scheduler.writes_) {  // something was written since the look: look again before sleeping
    scheduler.push(current);
    to_scheduler();
    current->seen = scheduler.writes_;
    return true;
  }
  current->state = State::kSpinning;
  current->on = flag;
  current->why = "spins for flag >=";
  current->detail = wanted;
  current->ticked = false;
  Fiber*& list = spinners(scheduler, flag);
  current->next = list;
  list = current;
  to_scheduler();
  current->seen = scheduler.writes_;
  return !current->ticked;
}

void Hooks::wrote(const void* flag) {
  Scheduler& scheduler = *current->scheduler;
  ++scheduler.writes_;
  for (Fiber** at = &spinners(scheduler, flag); *at;) {
    Fiber* const fiber = *at;
    if (fiber->on != flag) {
      at = &fiber->next;
      continue;
    }
    *at = fiber->next;
    scheduler.push(fiber);
  }
}

// ---- the scheduler --------------------------------------------------------------------------------------------------

Grid::Grid(std::string name, Body body, dim3 grid, dim3 block)
    : name(std::move(name)), body(std::move(body)), grid(grid), block(block) {}
unsigned Grid::blocks() const { return grid.x * grid.y * grid.z; }
unsigned Grid::threads() const { return block.x * block.y * block.z; }
unsigned Grid::left() const { return blocks() - started; }
unsigned Grid::resident() const { return started - ended; }
bool Grid::finished() const { return ended == blocks(); }
void Grid::join() { acquire(&begin_sync); }
void Grid::before_start() { release(&begin_sync); }
void Grid::after_end() { acquire(&end_sync); }

Scheduler::Scheduler(std::uint64_t seed, unsigned preempt_every)
    : rng_(seed * 0x9e3779b97f4a7c15u + 1),
      in_order_(seed == 0),
      by_priority_(seed & 1),
      preempt_every_(preempt_every) {
  if (preempt_every_) __atomic_fetch_add(&preemptive, 1, __ATOMIC_RELAXED);
}
Scheduler::~Scheduler() {
  while (!blocks_.empty()) abandon(blocks_.back()->grid);
  if (preempt_every_) __atomic_fetch_sub(&preemptive, 1, __ATOMIC_RELAXED);
}

std::uint32_t Scheduler::random() {
  rng_ ^= rng_ << 13;
  rng_ ^= rng_ >> 7;
  rng_ ^= rng_ << 17;
  return static_cast<std::uint32_t>(rng_ >> 32);
}

void Scheduler::push(Fiber* fiber) {
  fiber->state = State::kReady;
  ready_[(first_ + count_++) % ready_.size()] = fiber;
}

// Half of the seeds choose at random. The other half choose by priorities that change now and then, which holds some
// threads back for long; a uniform choice hardly ever does that.
Fiber* Scheduler::pick() {
  const auto at = [&](std::size_t i) -> Fiber*& { return ready_[(first_ + i) % ready_.size()]; };
  if (!in_order_) {
    std::size_t chosen = random() % count_;
    if (by_priority_) {
      if (random() % 64 == 0) at(chosen)->priority = random();
      const std::size_t first = chosen, some = count_ < kCandidates ? count_ : kCandidates;
      for (std::size_t i = 0; i < some; ++i) {
        const std::size_t candidate = (first + i) % count_;
        if (at(candidate)->priority > at(chosen)->priority) chosen = candidate;
      }
    }
    std::swap(at(0), at(chosen));
  }
  Fiber* const fiber = at(0);
  first_ = (first_ + 1) % ready_.size();
  --count_;
  return fiber;
}

void Scheduler::switch_to(Fiber* fiber) {
  current = fiber;
  ++switches_;
  switch_context(fiber->context);
  leave_stack(&main_fake_stack_, fiber->stack, stack_bytes());
  ringcomm_switch_stack(&main_stack_pointer_, fiber->stack_pointer);
  enter_stack(main_fake_stack_, nullptr, nullptr);
  current = nullptr;
}

void Scheduler::start_block(Grid* grid) {
  const unsigned number = grid->started++;
  auto* block = new Block;
  block->grid = grid;
  block->index =
      dim3(number % grid->grid.x, number / grid->grid.x % grid->grid.y, number / (grid->grid.x * grid->grid.y));
  block->live = static_cast<int>(grid->threads());
  block->warps.resize((block->live + kWarp - 1) / kWarp);
  block->arena = take_arena();
  poison(block->arena->memory, kSharedBytes);
  blocks_.push_back(block);
  live_ += block->live;
  if (live_ > ready_.size()) {  // here, never from a fiber
    std::vector<Fiber*> larger(2 * live_);
    for (std::size_t i = 0; i < count_; ++i) larger[i] = ready_[(first_ + i) % ready_.size()];
    ready_.swap(larger);
    first_ = 0;
  }
  const std::uint32_t priority = random();
  take_fibers(block->live, block->fibers);
  for (int i = 0; i < block->live; ++i) {
    Fiber* const fiber = block->fibers[i];
    const dim3& size = grid->block;
    fiber->scheduler = this;
    fiber->block = block;
    fiber->linear = i;
    fiber->index = dim3(i % size.x, i / size.x % size.y, i / (size.x * size.y));
    fiber->priority = (priority & ~0xffu) | (random() & 0xff);
    fiber->seen = 0;
    prepare_stack(fiber, &Hooks::entry);
    push(fiber);
  }
}

void Scheduler::end_block(Block* block) {
  for (Fiber* fiber : block->fibers) {
    if (fiber->state == State::kDone) continue;
    // Abandoned in the midst of its calls: TSan's context for it is of no use any more.
    void* const here = this_context();
    switch_context(fiber->context);
    release(&block->grid->end_sync);
    release(&block->arena->sync);
    release(&fiber->sync);
    switch_context(here);
    free_context(fiber->context);
    fiber->context = nullptr;
  }
  live_ -= block->fibers.size();
  unpoison(block->arena->memory, kSharedBytes);
  give_back(block->fibers, block->arena);
  ++block->grid->ended;
  for (Block*& b : blocks_)
    if (b == block) {
      b = blocks_.back();
      blocks_.pop_back();
      break;
    }
  delete block;
}

namespace {

std::string place(const Block& block) {
  std::string text =
      block.grid->name + " block(" + std::to_string(block.index.x) + "," + std::to_string(block.index.y) + ")";
  release(&block.grid->end_sync);  // its name was read before its end
  return text;
}

}  // namespace

Scheduler::Pause Scheduler::run(std::uint64_t budget) {
  main_context_ = this_context();
  for (; budget > 0; --budget) {
    if (count_ == 0) return Pause::kParked;
    Fiber* const fiber = pick();
    switch_to(fiber);
    Block* const block = fiber->block;
    if (fiber->state == State::kDone && --block->live == 0) {
      end_block(block);
      return Pause::kBlockEnded;
    }
    if (failed_) {
      failure_ = complaint_.what + (" " + std::to_string(complaint_.detail)) + complaint_.then + " in " +
                 place(*block) + " thread " + std::to_string(fiber->linear) + "\n";
      return Pause::kFailed;
    }
    if (block->waiting == block->live) {
      failed_ = block->grid;
      failure_ =
          "DEADLOCK: all threads left of a block wait at barriers that no other thread will reach\n" + who_waits();
      return Pause::kFailed;
    }
  }
  return Pause::kBudget;
}

bool Scheduler::wake_spinners() {
  bool any = false;
  for (Fiber*& list : spinning_)
    while (list) {
      Fiber* const fiber = list;
      list = fiber->next;
      fiber->ticked = true;
      push(fiber);
      any = true;
    }
  return any;
}

std::string Scheduler::who_waits() const {
  std::map<std::string, int> lines;
  for (const Block* block : blocks_)
    for (const Fiber* fiber : block->fibers) {
      if (fiber->state == State::kDone) continue;
      const bool runs = fiber->state == State::kReady;
      const std::string what = runs ? "runs" : fiber->why + (" " + std::to_string(fiber->detail));
      ++lines["  " + place(*block) + ": " + what];
    }
  std::string text;
  for (const auto& [line, threads] : lines) text += line + "  x" + std::to_string(threads) + "\n";
  return text;
}

void Scheduler::abandon(Grid* grid) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count_; ++i) {
    Fiber* const fiber = ready_[(first_ + i) % ready_.size()];
    if (fiber->block->grid != grid) ready_[(first_ + kept++) % ready_.size()] = fiber;
  }
  count_ = kept;
  for (Fiber*& list : spinning_)
    for (Fiber** at = &list; *at;)
      if ((*at)->block->grid == grid)
        *at = (*at)->next;
      else
        at = &(*at)->next;
  for (std::size_t i = blocks_.size(); i-- > 0;)
    if (blocks_[i]->grid == grid) end_block(blocks_[i]);
  if (failed_ == grid) failed_ = nullptr;
}

}  // namespace ringcomm::emulator
