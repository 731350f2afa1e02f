// The direct kernel on the emulator: all_reduce, reduce_scatter and reduce of single messages, lists and parts, in
// place on known and on visible memory and through the staging areas, against the scalar tree and the CPU engine's
// loops.
//
//   cuda_direct_test [quick | number of cases [first seed]]
#include "cpp/cuda/device/reduce_call.h"

namespace ringcomm::test {
namespace {

std::string some_calls(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(1, random.one_in(3) ? 8 : 5);
  World world(small_layout(world_size, random.between(1, 3), random));
  return calls_in_a_row(world, random,
                        {ReducePath::kKnown, ReducePath::kStaged, ReducePath::kStaged, ReducePath::kVisible},
                        random.between(1, 3));
}
std::string a_stream(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(2, random.one_in(3) ? 8 : 4);
  World world(small_layout(world_size, 1, random));
  return calls_in_a_stream(world, random, {ReducePath::kStaged, ReducePath::kVisible}, 3);
}
std::string absent(std::uint64_t seed) {
  return one_is_absent(seed, Algorithm::kDirect, {cuda::WaitKind::kPublished}, 450);
}
// One rank has not mapped a region that a peer publishes: it says so, and all ranks return.
std::string region_is_missing(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(2, 4), channels = random.between(1, 2);
  World world(small_layout(world_size, channels, random));
  std::vector<Memory> buffers;
  auto args = plain_all_reduce(world, buffers, Algorithm::kDirect, false, 400);
  const int owner = static_cast<int>(random.below(world_size)), region = random.between(0, cuda::kMaxRegions - 1);
  const int blind = (owner + random.between(1, world_size - 1)) % world_size;
  for (int r = 0; r < world_size; ++r) {
    const auto at = reinterpret_cast<std::uint64_t>(buffers[r].data());
    args.ranks[r].input = args.ranks[r].output = {-1, 1, at};
    if (r != blind) world.arena(r, owner, region) = buffers[owner].data() - 64;
  }
  (random.one_in(2) ? args.ranks[owner].input : args.ranks[owner].output) = {region, 1, 64};
  Form form = random_form(random, channels);
  form.exact = form.together = false;
  if (!world.run(sum_kernel(Algorithm::kDirect), args, form)) return world.error;
  const cuda::Status& status = world.status(blind);
  if (world.failure(blind) != cuda::Failure::kMismatch || status.peer != owner || !(status.mine == status.theirs))
    return "rank " + std::to_string(blind) + " did not say that it misses a region of rank " + std::to_string(owner);
  for (int r = 0; r < world_size; ++r)
    if (r != blind && world.failure(r) != cuda::Failure::kAborted) return "rank " + std::to_string(r) + " went on";
  return "";
}
std::string differs(std::uint64_t seed) { return one_differs(seed, Algorithm::kDirect, 400, 100); }

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
  const auto [quick, cases, first] = parse_arguments(argc, argv, 600);
  int bad = run_cases("direct, every pair", 1, first, every_pair);
  bad += run_cases("direct, some calls", cases, first, some_calls);
  bad += run_cases("direct, a stream of calls", cases / 3, first, a_stream);
  bad += run_cases("direct, one is absent", cases / 40 + 2, first, absent);
  bad += run_cases("direct, one differs", cases / 40 + 2, first, differs);
  bad += run_cases("direct, a region is missing", cases / 40 + 2, first, region_is_missing);
  return bad != 0;
}
