#include "cuda/tuning/plan.h"

#include <cstdlib>
#include <string>

#include "core/call/parts.h"
#include "core/error.h"
#include "core/schedule.h"

namespace ringcomm::cuda {

namespace {

// If ranks launch separately, packets save two barriers of the ranks, but every rank gets the whole message of every
// peer.
constexpr std::uint64_t oneshot_bytes(int world_size) { return world_size <= 4 ? 256u << 10 : 64u << 10; }
constexpr std::uint64_t kWideBytes = 32u << 10;      // LL128 above, where lines arrive whole
constexpr std::uint64_t kOneshotChannel = 1u << 10;  // bytes that are worth a further channel
constexpr std::uint64_t kChannel = 16u << 10;
// Assumed for an uneven all_to_all, whose size no rank knows: enough for every channel.
constexpr std::uint64_t kUnknownBytes = 1u << 20;

Algorithm choose(Op op, std::uint64_t nbytes, const Setting& setting) {
  const bool packets = op == Op::kAllReduce && !setting.known && nbytes <= oneshot_bytes(setting.layout.world_size);
  return packets ? Algorithm::kOneshot : Algorithm::kDirect;
}

int most_channels(const Plan& plan, std::uint64_t nbytes, const Setting& setting) {
  if (!plan.waits)  // every block a few vectors of its rank's share
    return static_cast<int>(larger(1, smaller(ceil_div(nbytes / setting.layout.world_size, plan.threads * 16), 65535)));
  const bool ring = plan.algorithm == Algorithm::kRing, oneshot = plan.algorithm == Algorithm::kOneshot;
  const std::uint64_t share = ring ? nbytes / setting.layout.world_size : nbytes;
  return static_cast<int>(
      larger(1, smaller(ceil_div(share, oneshot ? kOneshotChannel : kChannel), setting.usual_channels)));
}

}  // namespace

int threads_from_environment() {
  const char* const text = std::getenv("RINGCOMM_CUDA_THREADS");
  if (!text || !*text) return 0;
  const long threads = std::strtol(text, nullptr, 10);
  if (threads < 8 || threads > kMostBlockThreads || threads % kBlockThreadsStep != 0)
    fail(ErrorCode::kInvalid, "cuda engine: RINGCOMM_CUDA_THREADS expected a multiple of ", kBlockThreadsStep,
         " up to ", kMostBlockThreads, ", got ", text, "; unset it for the engine's choice");
  return static_cast<int>(threads);
}

Separation apart_from_environment() {
  const char* const text = std::getenv("RINGCOMM_CUDA_APART");
  const std::string value = text && *text ? text : "0";
  if (value != "0" && value != "1" && value != "2")
    fail(ErrorCode::kInvalid, "cuda engine: RINGCOMM_CUDA_APART expected 0, 1 or 2, got ", value,
         "; unset it for the engine's choice");
  return static_cast<Separation>(value[0] - '0');
}

std::uint64_t message_bytes(const Call& call, int world_size) {
  if (call.op == Op::kAllToAll && uneven_all_to_all(call)) return kUnknownBytes;
  const std::uint64_t element = element_bytes(call.dtype);
  if (!call.input_parts.empty()) return input_parts(call).total(world_size) * element;
  if (!call.output_parts.empty()) return output_parts(call).total(world_size) * element;
  const bool parts = call.op == Op::kReduceScatter || call.op == Op::kAllGather || call.op == Op::kGather ||
                     call.op == Op::kScatter || call.op == Op::kAllToAll;
  return call.count * element * (parts ? world_size : 1);
}

Plan make_plan(Op op, Algorithm requested, std::uint64_t nbytes, bool packets, bool copies_apart,
               const Setting& setting, const Tuning& tuning) {
  const Tuning::Entry* entry =
      requested == Algorithm::kAuto ? tuning.find(op, setting.layout.world_size, nbytes) : nullptr;
  if (entry && entry->algorithm == Algorithm::kOneshot && !packets) entry = nullptr;  // its numbers are not for direct
  Plan plan;
  plan.algorithm = requested != Algorithm::kAuto ? requested : entry ? entry->algorithm : choose(op, nbytes, setting);
  if (op == Op::kBarrier || (plan.algorithm == Algorithm::kOneshot && !packets)) plan.algorithm = Algorithm::kDirect;
  plan.known = setting.known && !copies_apart;
  plan.waits = !(plan.known && (plan.algorithm == Algorithm::kDirect || plan.algorithm == Algorithm::kCopyEngine));
  plan.wide_packets = plan.algorithm == Algorithm::kOneshot && setting.whole_lines && nbytes > kWideBytes;
  if (entry && entry->threads) plan.threads = entry->threads;
  if (setting.threads) plan.threads = setting.threads;
  // Each rank needs a thread that waits for it. The smallest block of a GPU has enough, that of the emulator may not.
  plan.threads = static_cast<int>(larger(plan.threads, round_up(setting.layout.world_size, kBlockThreadsStep)));
  plan.channels = most_channels(plan, nbytes, setting);
  if (entry && entry->channels)
    plan.channels = plan.waits ? static_cast<int>(smaller(entry->channels, setting.layout.channels)) : entry->channels;
  return plan;
}

int channels_that_fit(const Plan& plan, int blocks, int ranks) {
  const int each = blocks / ranks;
  if (!plan.waits) return static_cast<int>(larger(1, smaller(plan.channels, each)));
  return static_cast<int>(smaller(plan.channels, each));
}

int link_channels(const Layout& layout, int blocks) {
  const std::size_t links = larger(1, 2 * (layout.world_size - 1));  // to and from every peer
  const std::size_t room = blocks - smaller(blocks / 2, layout.channels);
  return static_cast<int>(larger(1, smaller(layout.p2p_channels, room / links)));
}

int message_channels(std::uint64_t nbytes, int most) {
  return static_cast<int>(larger(1, smaller(most, ceil_div(nbytes, kChannel))));
}

std::uint64_t oneshot_elements(const Layout& layout, int channels, std::uint64_t element) {
  return channels * layout.packet_bytes / element;
}

}  // namespace ringcomm::cuda
