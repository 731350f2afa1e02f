// Plans and tuning tables: pure functions, no device.
#include <cstdlib>

#include "core/error.h"
#include "cpp/ranks.h"
#include "cuda/memory/handle.h"
#include "cuda/tuning/plan.h"

namespace ringcomm::test {
namespace {

using cuda::Plan;
using cuda::Setting;
using cuda::Tuning;

Setting setting(int world_size, bool known) {
  Setting s;
  s.layout.world_size = world_size;
  s.layout.channels = s.usual_channels = 16;
  s.layout.packet_bytes = 19200;
  s.known = known;
  s.whole_lines = known;
  return s;
}
Plan plan(Op op, Algorithm requested, std::uint64_t nbytes, const Setting& s, const Tuning& tuning = {}) {
  return make_plan(op, requested, nbytes, s.layout.world_size <= cuda::kMaxPacketRanks, false, s, tuning);
}

// auto keeps the bits: it takes the ring for nothing that is added up.
void choices() {
  for (int w = 1; w <= cuda::kMaxRanks; ++w)
    for (const bool known : {false, true})
      for (std::uint64_t nbytes = 1; nbytes < 1ull << 34; nbytes *= 4)
        for (int o = 0; o <= static_cast<int>(Op::kBarrier); ++o) {
          const Op op = static_cast<Op>(o);
          const Plan p = plan(op, Algorithm::kAuto, nbytes, setting(w, known));
          const bool small = op == Op::kAllReduce && !known && nbytes <= 64u << 10 && w <= cuda::kMaxPacketRanks;
          require(p.algorithm != Algorithm::kRing && (!small || p.algorithm == Algorithm::kOneshot) &&
                      (p.algorithm == Algorithm::kOneshot ? op == Op::kAllReduce && !known : true),
                  concat("auto: ", name(op), " of ", nbytes, " bytes takes ", name(p.algorithm)));
          require(p.known == known && p.waits == !known, "a launch that knows everything waits for nobody");
          require(p.threads >= w, "a thread for every rank");
          require(p.channels >= 1 && (!p.waits || p.channels <= 16), "channels");
          require(!p.waits || channels_that_fit(p, 16 * w, w) == p.channels, "room for all channels");
        }
  const Plan ring = plan(Op::kReduce, Algorithm::kRing, 1 << 20, setting(4, true));
  require(ring.algorithm == Algorithm::kRing && ring.waits && ring.known, "ring on request");
  require(!make_plan(Op::kAllToAll, Algorithm::kAuto, 4096, false, true, setting(4, true), {}).known,
          "all_to_all in place");
  for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kOneshot, Algorithm::kDirect})
    require(
        make_plan(Op::kAllReduce, algorithm, 64, false, false, setting(4, false), {}).algorithm == Algorithm::kDirect,
        "what has no packets is direct");
  require(!plan(Op::kAllReduce, Algorithm::kOneshot, 4096, setting(4, true)).wide_packets, "short packets");
  require(plan(Op::kAllReduce, Algorithm::kOneshot, 1 << 20, setting(4, true)).wide_packets, "long packets");
}

void room() {
  Plan p = plan(Op::kAllReduce, Algorithm::kDirect, 1 << 24, setting(4, false));
  require(p.channels == 16 && channels_that_fit(p, 132, 4) == 16, "everything fits");
  require(channels_that_fit(p, 32, 4) == 8 && channels_that_fit(p, 4, 4) == 1, "less fits");
  require(channels_that_fit(p, 3, 4) == 0, "too many ranks");
  p = plan(Op::kAllReduce, Algorithm::kDirect, 1ull << 30, setting(4, true));
  require(channels_that_fit(p, 132, 4) == 33 && channels_that_fit(p, 3, 4) == 1, "who does not wait needs no room");
  Setting usual = setting(4, false);
  usual.layout = cuda::default_layout(4, {});
  usual.usual_channels = usual.layout.channels;
  for (const auto& [nbytes, channels] : {std::pair{1 << 10, 1}, {4 << 10, 4}, {64 << 10, 24}, {128 << 10, 24}})
    require(plan(Op::kAllReduce, Algorithm::kAuto, nbytes, usual).channels == channels, "1 KiB of packets a channel");
  require(cuda::oneshot_elements(usual.layout, 24, 1) >= 256 << 10, "the most packets in one launch");
  require(cuda::oneshot_elements(setting(4, false).layout, 2, 4) == 9600, "what the boxes hold");
  const cuda::Layout two = cuda::default_layout(2, {}), eight = cuda::default_layout(8, {});
  require(cuda::link_channels(two, 132) == 16 && cuda::link_channels(two, 16) == 4,
          "a collective has room beside links");
  require(cuda::link_channels(eight, 132) == 7 && cuda::link_channels(eight, 1) == 1, "all links at once");
  require(cuda::message_channels(0, 16) == 1 && cuda::message_channels(16384, 16) == 1, "a block for a small message");
  require(cuda::message_channels(16385, 16) == 2 && cuda::message_channels(1 << 30, 9) == 9, "more for a large one");
}

void bytes() {
  Call call;
  call.dtype = DType::kFloat32;
  call.count = 10;
  call.op = Op::kAllReduce;
  require(cuda::message_bytes(call, 4) == 40, "all_reduce");
  call.op = Op::kReduceScatter;
  require(cuda::message_bytes(call, 4) == 160, "reduce_scatter");
  call.input_parts = {{nullptr, 1}, {nullptr, 2}, {nullptr, 0}, {nullptr, 5}};
  require(cuda::message_bytes(call, 4) == 32, "uneven reduce_scatter");
}

void refuses(const std::string& text, const std::string& word) {
  try {
    Tuning::parse(text, "table");
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kInvalid && std::string(error.what()).find(word) != std::string::npos &&
                std::string(error.what()).find("table line 2") != std::string::npos,
            concat("tuning: ", error.what()));
    return;
  }
  require(false, "tuning accepts " + text);
}

void tables() {
  const std::string text =
      "# a table\n"
      "all_reduce 4 1048576 direct 8 0   # larger ones first\n"
      "\n"
      "all_reduce 4 65536 oneshot 4 256\n"
      "all_reduce 4 max direct 0 0\n"
      "all_gather 2 max ring 16 0\n";
  const Tuning t = Tuning::parse(text, "table");
  require(t.entries().size() == 4 && t.source() == "table", "entries");
  require(t.find(Op::kAllReduce, 4, 65536)->algorithm == Algorithm::kOneshot, "up to and including");
  require(t.find(Op::kAllReduce, 4, 65537)->channels == 8, "the next one");
  require(t.find(Op::kAllReduce, 4, 1ull << 40)->channels == 0, "the largest");
  require(!t.find(Op::kAllReduce, 3, 1) && !t.find(Op::kReduce, 4, 1), "nothing for others");
  const Plan p = plan(Op::kAllReduce, Algorithm::kAuto, 1000, setting(4, false), t);
  require(p.algorithm == Algorithm::kOneshot && p.channels == 4 && p.threads == 256, "a plan by the table");
  const Plan without_packets = make_plan(Op::kAllReduce, Algorithm::kAuto, 60000, false, false, setting(4, false), t);
  const Plan direct = plan(Op::kAllReduce, Algorithm::kDirect, 60000, setting(4, false));
  require(without_packets.algorithm == Algorithm::kDirect && without_packets.channels == direct.channels &&
              without_packets.threads == direct.threads,
          "where there are no packets, direct does not take the channels and threads of an entry for oneshot");
  require(plan(Op::kAllReduce, Algorithm::kDirect, 1000, setting(4, false), t).algorithm == Algorithm::kDirect,
          "a request comes before the table");
  require(plan(Op::kAllGather, Algorithm::kAuto, 1000, setting(2, false), t).algorithm == Algorithm::kRing,
          "copies may go round the ring");
  const Tuning there = Tuning::parse("device NVIDIA H200  # measured there\nlinks same device\n" + text, "table");
  there.check_measured_on("NVIDIA H200", cuda::Path::kSame, 0);
  there.check_measured_on("NVIDIA H200", cuda::Path::kUnknown, 0);
  t.check_measured_on("anything", cuda::Path::kNvlink, 0);
  require(t.serves(4) && t.serves(2) && !t.serves(3) && !t.serves(1), "world sizes of a file");
  for (const auto& [device, links] :
       {std::pair("NVIDIA H100", cuda::Path::kSame), std::pair("NVIDIA H200", cuda::Path::kNvlink)}) {
    bool refused = false;
    try {
      there.check_measured_on(device, links, 3);
    } catch (const Error& error) {
      refused = std::string(error.what()).find("rank 3") != std::string::npos;
    }
    require(refused, concat("a file of another machine on ", device, " over ", name(links)));
  }
  require(t.checksum() == Tuning::parse(text + "# more\n", "other").checksum() && t.checksum() != there.checksum() &&
              t.checksum() != Tuning::parse(text + "reduce 4 max direct 0 0\n", "table").checksum(),
          "checksums");
  require(t.most_channels() == 0 && Tuning::parse("reduce 4 max direct 32 0\n", "").most_channels() == 32 &&
              Tuning::parse("reduce 4 max direct 999 0\n", "").most_channels() == cuda::kMaxChannels,
          "channels that a file asks for");
  refuses("\nall_reduce 4 65536 oneshot 4\n", "six columns");
  refuses("\nall_reduce 4 65536 oneshot 4 256 7\n", "six columns");
  refuses("\nall_reduse 4 65536 oneshot 4 256\n", "all_reduse");
  refuses("\nall_reduce 33 65536 direct 4 256\n", "world_size from 1 to 32");
  refuses("\nall_reduce 9 65536 oneshot 4 256\n", "world_size of at most 8 with oneshot");
  refuses("\nall_reduce 4 -1 oneshot 4 256\n", "up_to_bytes");
  refuses("\nall_reduce 4 65536 ring 4 256\n", "bits");
  refuses("\nreduce 4 65536 oneshot 4 256\n", "oneshot");
  refuses("\nall_to_all 4 65536 ring 4 256\n", "ring");
  refuses("\nall_reduce 4 65536 tree 4 256\n", "tree");
  refuses("\nall_reduce 4 65536 direct 4 1024\n", "threads");
  refuses("\nall_reduce 4 65536 direct 4 12\n", "multiple");
  setenv("RINGCOMM_TUNING", "/nowhere/at/all", 1);
  try {
    Tuning::from_environment();
    require(false, "a table that is not there");
  } catch (const Error& error) {
    require(std::string(error.what()).find("/nowhere/at/all") != std::string::npos, error.what());
  }
}

}  // namespace
}  // namespace ringcomm::test

int main() {
  using namespace ringcomm::test;
  choices();
  room();
  bytes();
  tables();
  std::printf("cuda_plan_test passed\n");
}
