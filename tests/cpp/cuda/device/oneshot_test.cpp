// The oneshot kernel on the emulator: LL and LL128 packets, between calls of other paths, against the scalar tree
// and the CPU engine's loops.
//
//   cuda_oneshot_test [quick | number of cases [first seed]]
#include "cuda/device/oneshot.h"
#include "cpp/cuda/device/reduce_call.h"

namespace ringcomm::test {
namespace {

std::string some_calls(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(1, random.one_in(3) ? 8 : 5);
  World world(small_layout(world_size, random.between(1, 3), random));
  return calls_in_a_row(world, random,
                        {ReducePath::kLL, ReducePath::kLL, ReducePath::kLL128, ReducePath::kLL128, ReducePath::kStaged},
                        4);
}
std::string a_stream(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(2, random.one_in(3) ? 8 : 4);
  World world(small_layout(world_size, 1, random));
  return calls_in_a_stream(
      world, random, {ReducePath::kLL, ReducePath::kLL, ReducePath::kLL128, ReducePath::kStaged, ReducePath::kVisible},
      5);
}
std::string absent(std::uint64_t seed) {
  return one_is_absent(seed, Algorithm::kOneshot, {cuda::WaitKind::kPackets}, 450);
}
std::string differs(std::uint64_t seed) { return one_differs(seed, Algorithm::kOneshot, 400, 100); }

// LL flags come round again after kFlagPeriod messages. A line that was last written a period ago, with what is the
// flag again, must not be taken for fresh.
std::string flags_come_round(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(2, 4);
  cuda::Layout layout = small_layout(world_size, 1, random);
  World world(layout);
  for (int r = 0; r < world_size; ++r) {
    char* const channel = world.segment(r) + layout.channel_at(0);
    reinterpret_cast<cuda::ChannelState*>(channel)->packets = cuda::kFlagPeriod - 2;
    for (int box = 0; box < 2 * world_size; ++box)
      for (std::uint64_t at = layout.ll_at(); at < layout.ll128_at(); at += sizeof(cuda::Vec)) {
        const cuda::u32 flag = cuda::ll_flag(cuda::kFlagPeriod + box / world_size);
        const cuda::Vec stale = {{0xdddddddd, flag, 0xdddddddd, flag}};
        std::memcpy(channel + layout.boxes_at() + box * layout.box_bytes() + at, &stale, sizeof stale);
      }
  }
  return calls_in_a_row(world, random, {ReducePath::kLL}, 6);
}

// The calls that oneshot has a kernel for, and no others.
std::string pairs(std::uint64_t) {
  const auto has = [](DType dtype, ReduceOp op) {
    const cuda::Arithmetic pair = cuda::arithmetic_of(dtype, op);
    return cuda::oneshot_kernel(pair.dtype, pair.op) != nullptr;
  };
  for (const DType dtype :
       {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt64, DType::kInt32})
    if (!has(dtype, ReduceOp::kSum) || !has(dtype, ReduceOp::kAvg)) return std::string("no sum of ") + name(dtype);
  for (const DType dtype : {DType::kFloat32, DType::kInt64, DType::kInt32})
    if (!has(dtype, ReduceOp::kMax)) return std::string("no max of ") + name(dtype);
  for (int d = 0; d <= static_cast<int>(DType::kBool); ++d)
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kProd, ReduceOp::kBor})
      if (supports(static_cast<DType>(d), op) && has(static_cast<DType>(d), op))
        return std::string("a kernel for ") + name(op) + " of " + name(static_cast<DType>(d));
  return "";
}

// What LL128 has left in a box is anything, also what LL would take for its flag two messages later.
std::string data_like_flags(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(2, 4), count = random.between(1, 400);
  World world(small_layout(world_size, 1, random));
  for (int call = 0; call < 3; ++call) {
    std::vector<Memory> buffers;
    cuda::CallArgs args = plain_all_reduce(world, buffers, Algorithm::kOneshot, call == 0, count);
    args.dtype = DType::kInt32;
    const std::int32_t value = call == 0 ? static_cast<std::int32_t>(cuda::ll_flag(2)) : 1000 + call;
    for (const Memory& buffer : buffers)
      for (int i = 0; i < count; ++i) std::memcpy(buffer.data() + i * sizeof value, &value, sizeof value);
    Form form = random_form(random, 1);
    if (!world.run(cuda::oneshot_kernel(DType::kInt32, ReduceOp::kSum), args, form)) return world.error;
    for (const Memory& buffer : buffers)
      for (int i = 0; i < count; ++i)
        if (at<std::int32_t>(buffer.data(), i) != value * world_size) return "call " + std::to_string(call);
  }
  return "";
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  const auto [quick, cases, first] = parse_arguments(argc, argv, 600);
  int bad = run_cases("oneshot, pairs", 1, first, pairs);
  bad += run_cases("oneshot, some calls", cases, first, some_calls);
  bad += run_cases("oneshot, flags come round", cases / 20 + 2, first, flags_come_round);
  bad += run_cases("oneshot, a stream of calls", cases / 3, first, a_stream);
  bad += run_cases("oneshot, data like flags", cases / 20 + 2, first, data_like_flags);
  bad += run_cases("oneshot, one is absent", cases / 40 + 2, first, absent);
  bad += run_cases("oneshot, one differs", cases / 40 + 2, first, differs);
  return bad != 0;
}
