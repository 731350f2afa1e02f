// Calls that follow each other without a host in between: a rank may be a call ahead of its peers, and must not touch
// what they still read. Tests that return to the host after every call cannot see that; here one launch makes many.
#include "core/error.h"
#include "cpp/cuda/device/world.h"

namespace ringcomm::test {
namespace {

using namespace ringcomm::cuda;
constexpr int kCalls = 4;

struct Calls {
  Kernel<CallArgs> kernel;
  const CallArgs* of;  // each with its own buffers
};

void one_after_the_other(Calls calls) {
  for (int i = 0; i < kCalls; ++i) {
    calls.kernel(calls.of[i]);
    __syncthreads();  // as between two launches on one stream
  }
}

// What rank `rank` gives to call `call`: whole numbers, so that every order of a sum has the same bits.
float given(int rank, int call, std::size_t i) { return static_cast<float>((i * 7 + rank * 31 + call * 101) % 997); }

struct Buffers {
  explicit Buffers(std::size_t count) : input(count * sizeof(float)), output(count * sizeof(float)) {}
  Memory input, output;
};

std::string all_reduces(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(2, 5), channels = random.between(1, 2);
  const Algorithm algorithm = random.pick({Algorithm::kOneshot, Algorithm::kDirect, Algorithm::kRing});
  const bool wide = random.one_in(2), visible = random.one_in(2);
  World world(small_layout(world_size, channels, random));
  const std::size_t most = algorithm == Algorithm::kOneshot ? channels * world.layout().packet_bytes / 4 - 8 : 3000;

  std::vector<CallArgs> calls;
  std::vector<std::vector<Buffers>> buffers(kCalls);
  std::vector<std::size_t> counts;
  for (int c = 0; c < kCalls; ++c) {
    const std::size_t count = counts.emplace_back(random.count(most));
    CallArgs args = world.call<CallArgs>(Op::kAllReduce, DType::kFloat32, algorithm, 0, count);
    args.reduce_op = ReduceOp::kSum;
    args.wide_packets = wide;
    args.num_messages = 1;
    args.counts[0] = count;
    args.timeout_ns = 600'000'000'000;
    for (int r = 0; r < world_size; ++r) {
      Buffers& own = buffers[c].emplace_back(count);
      for (std::size_t i = 0; i < count; ++i) reinterpret_cast<float*>(own.input.data())[i] = given(r, c, i);
      args.buffers(0, r) = {own.input.data(), own.output.data()};
      args.ranks[r].input = {-1, visible, reinterpret_cast<std::uint64_t>(own.input.data())};
      args.ranks[r].output = {-1, visible, reinterpret_cast<std::uint64_t>(own.output.data())};
    }
    calls.push_back(args);
  }

  emulator::Options options;
  options.seed = seed;
  emulator::Simulation simulation(options);
  simulation.launch("calls", one_after_the_other, dim3(channels, world_size), dim3(16),
                    Calls{sum_kernel(algorithm), calls.data()});
  const std::string what =
      concat(name(algorithm), wide ? " wide" : "", visible ? " visible" : "", ", ", world_size, " ranks: ");
  if (!simulation.run()) return what + simulation.error;
  for (int c = 0; c < kCalls; ++c)
    for (int r = 0; r < world_size; ++r) {
      if (world.failure(r) != Failure::kNone) return concat(what, "rank ", r, " gave up");
      for (std::size_t i = 0; i < counts[c]; ++i) {
        float want = 0;
        for (int p = 0; p < world_size; ++p) want += given(p, c, i);
        const float got = reinterpret_cast<const float*>(buffers[c][r].output.data())[i];
        if (got != want) return concat(what, "call ", c, " rank ", r, " element ", i, ": ", got, " for ", want);
      }
    }
  return "";
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  const auto [quick, cases, first] = parse_arguments(argc, argv, 600);
  return run_cases("calls back to back", cases, first, all_reduces);
}
