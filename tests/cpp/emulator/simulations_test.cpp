// The emulator's simulations, with small kernels: what they must run, and what they must report. The emulated GPU has
// gpu_test.cpp, the engine's kernels have their own tests.
#include <vector>

#include "cpp/emulator/tools.h"

namespace ringcomm::test {
namespace {

struct RingArgs {
  Word* flags;  // one for each block
  long *sum, *seen;
};
__global__ void pass_round(RingArgs args) {
  RINGCOMM_SHARED(long, carried);
  const unsigned me = blockIdx.x, blocks = gridDim.x;
  if (threadIdx.x == 0) {
    if (me > 0) await(&args.flags[me], 1);
    put(&carried, me == 0 ? 0 : get(args.sum));
  }
  __syncthreads();
  atomicAdd(reinterpret_cast<unsigned long long*>(&carried), 1ull);
  __syncthreads();
  if (threadIdx.x == 0) {
    put(args.sum, get(&carried));
    post(&args.flags[(me + 1) % blocks], 1);
  }
  put(&args.seen[me * blockDim.x + threadIdx.x], get(&carried));
}

emulator::Options seeded(std::uint64_t seed, unsigned max_resident = 0) {
  emulator::Options options;
  options.seed = seed;
  options.max_resident = max_resident;
  return options;
}

std::uint64_t run_ring(std::uint64_t seed, unsigned max_resident) {
  constexpr int kBlocks = 5, kThreads = 20;  // the last warp is not full
  Word flags[kBlocks] = {};
  long sum = 0;
  std::vector<long> seen(kBlocks * kThreads);
  emulator::Simulation simulation(seeded(seed, max_resident));
  simulation.launch("pass_round", pass_round, dim3(kBlocks), dim3(kThreads), RingArgs{flags, &sum, seen.data()});
  require(simulation.run(), simulation.error.c_str(), static_cast<long>(seed));
  require(sum == kBlocks * kThreads, "every thread of every block has added one", sum);
  for (int i = 0; i < kBlocks * kThreads; ++i) require(seen[i] == (i / kThreads + 1) * kThreads, "barriers hold", i);
  return simulation.switches;
}
void blocks_and_flags() {
  for (std::uint64_t seed = 0; seed < 40; ++seed)
    for (unsigned max_resident : {0u, 1u, 2u}) run_ring(seed, max_resident);
}
void a_seed_repeats() {
  std::vector<std::uint64_t> switches;
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    switches.push_back(run_ring(seed, 0));
    require(run_ring(seed, 0) == switches.back(), "a seed gives one schedule", static_cast<long>(seed));
  }
  bool differ = false;
  for (auto n : switches) differ = differ || n != switches[0];
  require(differ, "seeds give different schedules");
}

struct WarpResults {
  int *rotated, *crossed, *all, *any, *block_and, *block_or, *some_and;
  unsigned* votes;
};
__global__ void warps(WarpResults out) {
  const int i = static_cast<int>(threadIdx.x), lane = emulator::lane();
  constexpr int kWarp = emulator::kWarp;
  out.rotated[i] = __shfl_sync(~0u, i * 3, (lane + 1) % kWarp);
  out.crossed[i] = __shfl_xor_sync(~0u, i * 5, 1);
  out.votes[i] = __ballot_sync(~0u, lane % 3 == 0);
  out.all[i] = __all_sync(~0u, i >= kWarp);
  out.any[i] = __any_sync(~0u, i == kWarp);
  out.block_and[i] = __syncthreads_and(i != 5) * 10 + __syncthreads_and(i >= 0);
  out.block_or[i] = __syncthreads_or(i == 5) * 10 + __syncthreads_or(i < 0);
  constexpr int kSome = 2 * kWarp;  // the last warp does not come
  out.some_and[i] = i < kSome ? emulator::bar_and(1, kSome, i != 5) * 10 + emulator::bar_and(1, kSome, true) : 1;
}
void warp_operations() {
  constexpr int kWarp = emulator::kWarp, kThreads = 3 * kWarp;
  unsigned votes = 0;
  for (int l = 0; l < kWarp; l += 3) votes |= 1u << l;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<int> out[7];
    for (auto& o : out) o.resize(kThreads, -1);
    std::vector<unsigned> ballots(kThreads);
    emulator::Simulation simulation(seeded(seed));
    simulation.launch("warps", warps, dim3(1), dim3(kThreads),
                      WarpResults{out[0].data(), out[1].data(), out[2].data(), out[3].data(), out[4].data(),
                                  out[5].data(), out[6].data(), ballots.data()});
    require(simulation.run(), simulation.error.c_str(), static_cast<long>(seed));
    for (int i = 0; i < kThreads; ++i) {
      const int warp = i / kWarp, lane = i % kWarp;
      require(out[0][i] == (warp * kWarp + (lane + 1) % kWarp) * 3, "__shfl_sync", i);
      require(out[1][i] == (i ^ 1) * 5, "__shfl_xor_sync", i);
      require(ballots[i] == votes, "__ballot_sync", i);
      require(out[2][i] == (warp > 0), "__all_sync", i);
      require(out[3][i] == (warp == 1), "__any_sync", i);
      require(out[4][i] == 1 && out[5][i] == 10, "__syncthreads_and, __syncthreads_or", i);
      require(out[6][i] == 1, "bar.red.and of two warps", i);
    }
  }
}

__global__ void counts_differ(int*) { emulator::bar(3, threadIdx.x < 8 ? 16 : 24); }
__global__ void too_few_come(int*) {
  if (threadIdx.x != 0) emulator::bar_and(1, 2 * emulator::kWarp, true);
}
__global__ void lane_leaves(int* out) {
  if (emulator::lane() != 0) put(&out[threadIdx.x], __any_sync(~0u, true));
}
__global__ void too_much_shared(int*) {
  using Large = char[64 << 10];
  RINGCOMM_SHARED(Large, large);
  large[0] = 1;
}
__global__ void traps(int*) {
  if (threadIdx.x == 3) __trap();
}
void misuse_is_reported() {
  constexpr int kThreads = 2 * emulator::kWarp;
  const auto error_of = [](void (*kernel)(int*)) {
    std::vector<int> out(kThreads);
    emulator::Simulation simulation(seeded(7));
    simulation.launch("misused", kernel, dim3(1), dim3(kThreads), out.data());
    require(!simulation.run(), "misuse is an error");
    return simulation.error;
  };
  require_says(error_of(half_arrives), "DEADLOCK: all threads left of a block wait at barriers");
  const std::string half = "misused block(0,0): waits at __syncthreads, bar 0  x" + std::to_string(kThreads / 2);
  require_says(error_of(half_arrives), half.c_str());
  require_says(error_of(counts_differ), "BARRIER MISUSE: thread counts differ at barrier 3 in misused block(0,0)");
  require_says(error_of(too_few_come),
               ("misused block(0,0): waits at bar 1  x" + std::to_string(kThreads - 1)).c_str());
  require_says(error_of(lane_leaves), "waits at a warp operation, warp 1");
  require_says(error_of(too_much_shared), "SHARED MEMORY: no room for a variable of 65536 bytes");
  require_says(error_of(traps), "TRAP");
}

__global__ void waits_for_each_other(PairArgs args) {  // each posts only after the other has
  if (threadIdx.x == 0) {
    await(args.mine, 1);
    post(args.theirs, 1);
  }
  __syncthreads();
}
void deadlocks_are_reported() {
  Word a = 0, b = 0;
  for (std::uint64_t seed : {0, 1, 2}) {
    emulator::Simulation simulation(seeded(seed));
    simulation.launch("left", waits_for_each_other, dim3(1), dim3(4), PairArgs{&a, &b});
    simulation.launch("right", waits_for_each_other, dim3(1), dim3(4), PairArgs{&b, &a});
    require(!simulation.run(), "a ring of waits is a deadlock");
    require_says(simulation.error, "DEADLOCK: every live thread waits");
    require_says(simulation.error, "left block(0,0): spins for flag >= 1  x1");
    require_says(simulation.error, "right block(0,0): waits at __syncthreads, bar 0  x3");
  }
  for (unsigned room : {0u, 2u, 1u}) {
    a = b = 0;
    emulator::Simulation simulation(seeded(5, room));
    simulation.launch("left", handshake, dim3(1), dim3(4), PairArgs{&a, &b});
    simulation.launch("right", handshake, dim3(1), dim3(4), PairArgs{&b, &a});
    require(simulation.run() == (room != 1), "two blocks that meet need room for two", room);
    if (room == 1) require_says(simulation.error, "right: not started (no room on the device)  x1 blocks");
  }
}

__global__ void raises(AbortArgs args) { post(args.abort, 1); }
void sleepers_look_at_other_flags() {
  Word never = 0, abort = 0, ticks = 0;
  emulator::Simulation closed(seeded(3));
  closed.launch("waits", waits_in_vain, dim3(1), dim3(2), AbortArgs{&never, &abort, &ticks, kFar});
  closed.launch("raises", raises, dim3(1), dim3(1), AbortArgs{&never, &abort, &ticks, kFar});
  require(closed.run(), closed.error.c_str());

  emulator::Options open = seeded(3);
  open.exact = false;
  abort = ticks = 0;
  emulator::Simulation timed(open);
  timed.launch("waits", waits_in_vain, dim3(1), dim3(2),
               AbortArgs{&never, &abort, &ticks, emulator::global_timer_ns() + 20'000'000});
  require(timed.run() && ticks > 0, "a time limit ends the wait", static_cast<long>(ticks));
}

}  // namespace
}  // namespace ringcomm::test

int main() {
  using namespace ringcomm::test;
  blocks_and_flags();
  a_seed_repeats();
  warp_operations();
  misuse_is_reported();
  deadlocks_are_reported();
  sleepers_look_at_other_flags();
  std::printf("emulator_simulations_test passed\n");
}
