// What a kernel may call.
#include <time.h>

#include "fibers_state.h"

namespace ringcomm::emulator {

int preemptive = 0;

namespace {

struct Arrival {
  int threads;  // that meet
  bool waits, orders;
  const char* why;
  std::uint64_t detail;
};

// `last` is run by the last thread to arrive. Returns the generation of the barrier that this was.
template <typename Last>
unsigned arrive(Barrier& barrier, const Arrival& arrival, const Last& last) {
  yield();
  if (barrier.arrived == 0)
    barrier.expected = arrival.threads;
  else if (barrier.expected != arrival.threads)
    Hooks::fail("BARRIER MISUSE: thread counts differ at barrier", arrival.detail);
  const unsigned generation = barrier.generation;
  char* const sync = &barrier.sync[generation & 1];
  if (arrival.orders) release(sync);
  if (++barrier.arrived == arrival.threads) {
    last(generation & 1);
    barrier.arrived = 0;
    ++barrier.generation;
    Block& block = *current->block;
    while (Fiber* const fiber = barrier.waiting) {
      barrier.waiting = fiber->next;
      --block.waiting;
      Hooks::wake(fiber);
    }
  } else if (arrival.waits) {
    Hooks::park_at_barrier(barrier, arrival.why, arrival.detail);
  }
  if (arrival.orders && arrival.waits) acquire(sync);
  return generation & 1;
}

Barrier& named(int id) {
  if (id < 0 || id >= kNamedBarriers) Hooks::fail("BARRIER MISUSE: no such barrier,", static_cast<std::uint64_t>(id));
  return current->block->barriers[id];
}
unsigned vote(int id, int threads, const char* why, bool value) {
  Barrier& barrier = named(id);
  barrier.all = barrier.all && value;
  barrier.any = barrier.any || value;
  const auto count = [&](unsigned generation) {
    barrier.all_of[generation] = barrier.all;
    barrier.any_of[generation] = barrier.any;
    barrier.all = true;
    barrier.any = false;
  };
  return arrive(barrier, {threads, true, true, why, static_cast<std::uint64_t>(id)}, count);
}
unsigned vote_of_all(bool value) {
  return vote(0, static_cast<int>(current->block->fibers.size()), "waits at __syncthreads, bar", value);
}

int warp_number() { return current->linear / kWarp; }
Warp& warp() { return current->block->warps[warp_number()]; }
int lanes() {
  const int left = static_cast<int>(current->block->fibers.size()) - warp_number() * kWarp;
  return left < kWarp ? left : kWarp;
}
// Volatile, so that it becomes no library call, which a sanitizer would take for an access of the kernel.
void copy_words(const volatile std::uint64_t (*from)[2], volatile std::uint64_t (*to)[2]) {
  for (int lane = 0; lane < kWarp; ++lane)
    for (int k = 0; k < 2; ++k) to[lane][k] = from[lane][k];
}

}  // namespace

dim3 thread_index() { return current->index; }
dim3 block_index() { return current->block->index; }
dim3 block_dim() { return current->block->grid->block; }
dim3 grid_dim() { return current->block->grid->grid; }
int lane() { return current->linear % kWarp; }
std::uint32_t rnd() { return current ? Hooks::random() : 0; }
std::uint64_t global_timer_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000000000u + static_cast<std::uint64_t>(now.tv_nsec);
}

void yield_now() {
  if (!current || Hooks::preempt_every() == 0 || Hooks::random() % Hooks::preempt_every() != 0) return;
  Hooks::wake(current);
  Hooks::to_scheduler();
}
void look() {
  yield();
  if (current) current->seen = Hooks::writes();
}
bool spin_on(const void* flag, std::uint64_t wanted) { return !current || Hooks::spin(flag, wanted); }
void wrote(const void* flag) {
  if (current) Hooks::wrote(flag);
}

void bar(int id, int threads) {
  arrive(named(id), {threads, true, true, "waits at bar", static_cast<std::uint64_t>(id)}, [](unsigned) {});
}
void bar_arrive(int id, int threads) {
  arrive(named(id), {threads, false, true, "", static_cast<std::uint64_t>(id)}, [](unsigned) {});
}
int bar_and(int id, int threads, bool value) {
  const unsigned generation = vote(id, threads, "waits at bar", value);
  return named(id).all_of[generation];
}
void sync_threads() { vote_of_all(true); }
int sync_threads_and(bool value) { return current->block->barriers[0].all_of[vote_of_all(value)]; }
int sync_threads_or(bool value) { return current->block->barriers[0].any_of[vote_of_all(value)]; }
void sync_warp() {
  arrive(warp().in, {lanes(), true, true, "waits at __syncwarp, warp", static_cast<std::uint64_t>(warp_number())},
         [](unsigned) {});
}
void trap() { Hooks::fail("TRAP: __trap() called, code", 0); }

void warp_op(std::uint64_t& a, std::uint64_t& b, void* context, Exchange exchange) {
  Warp& w = warp();
  const int mine = lane(), count = lanes();
  const auto number = static_cast<std::uint64_t>(warp_number());
  w.words[mine][0] = a;
  w.words[mine][1] = b;
  arrive(w.in, {count, true, false, "waits at a warp operation, warp", number}, [&](unsigned) {
    std::uint64_t words[kWarp][2];  // the exchange is the kernel's code, seen by sanitizers: on this thread's stack
    copy_words(w.words, words);
    exchange(words, count, context);
    copy_words(words, w.words);
  });
  a = w.words[mine][0];
  b = w.words[mine][1];
  arrive(w.out, {count, true, false, "leaves a warp operation, warp", number}, [](unsigned) {});
}

void* shared_memory(const void* site, std::size_t nbytes) {
  Block& block = *current->block;
  for (int i = 0; i < block.num_variables; ++i)
    if (block.variables[i].site == site) return block.variables[i].at;
  const std::size_t taken = (nbytes + 127) / 128 * 128 + 128;  // with a red zone
  if (block.shared_used + taken > kSharedBytes || block.num_variables == kMostShared)
    Hooks::fail("SHARED MEMORY: no room for a variable of", nbytes, " bytes");
  char* const at = block.arena->memory + block.shared_used;
  block.shared_used += taken;
  block.variables[block.num_variables++] = {site, at};
  unpoison(at, nbytes);
  for (std::size_t i = 0; i < nbytes; ++i) static_cast<volatile char*>(at)[i] = static_cast<char>(0xa5);
  return at;
}

}  // namespace ringcomm::emulator
