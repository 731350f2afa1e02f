// The direct kernel on the emulator: all_reduce, reduce_scatter and reduce of single messages, lists and parts, in
// place on known and on visible memory and through the staging areas, against the scalar tree and the CPU engine's
// loops.
//
//   cuda_direct_test [quick | number of cases [first seed]]
#include "cuda_reduce_call.h"

namespace ringcomm::test {
namespace {

std::string some_calls(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(1, random.one_in(3) ? 8 : 5);
  World world(small_layout(world_size, random.between(1, 3), random));
  return calls_in_a_row(world, random, {Way::kKnown, Way::kStaged, Way::kStaged, Way::kVisible}, random.between(1, 3));
}
std::string a_stream(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(2, random.one_in(3) ? 8 : 4);
  World world(small_layout(world_size, 1, random));
  return calls_in_a_stream(world, random, {Way::kStaged, Way::kVisible}, 3);
}
std::string absent(std::uint64_t seed) {
  return one_is_absent(seed, Algorithm::kDirect, cuda::WaitKind::kAnnouncement);
}
std::string differs(std::uint64_t seed) { return one_differs(seed, Algorithm::kDirect); }

// Every pair of a caller has a kernel, which computes what it should.
std::string every_pair(std::uint64_t) {
  for (int d = 0; d <= static_cast<int>(DType::kBool); ++d)
    for (int o = 0; o <= static_cast<int>(ReduceOp::kBxor); ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (!supports(dtype, op)) continue;
      const cuda::Arithmetic pair = cuda::arithmetic_of(dtype, op);
      if (pair.scale * element_bytes(pair.dtype) != element_bytes(dtype)) return "a pair of another size";
      if (!cuda::direct_kernel(pair.dtype, pair.op) || !cuda::known_kernel(pair.dtype, pair.op))
        return std::string("no kernel for ") + name(dtype) + " " + name(op);
    }
  return "";
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  const bool quick = argc > 1 && std::strcmp(argv[1], "quick") == 0;
  const int cases = quick ? 60 : argc > 1 ? std::atoi(argv[1]) : 600;
  const std::uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  int bad = run_cases("direct, every pair", 1, first, every_pair);
  bad += run_cases("direct, some calls", cases, first, some_calls);
  bad += run_cases("direct, a stream of calls", cases / 3, first, a_stream);
  bad += run_cases("direct, one is absent", cases / 40 + 2, first, absent);
  bad += run_cases("direct, one differs", cases / 40 + 2, first, differs);
  return bad != 0;
}
