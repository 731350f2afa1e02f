// How a call is served: algorithm, channels, threads. The plan is a pure function of facts that all ranks share, so
// that all ranks make the same plan. auto never changes the bits.
//
//   all_reduce                       oneshot while it is small and ranks launch separately, else direct; ring on
//   request.
//                                    A call for which oneshot has no kernel uses direct, with the same bits
//   reduce_scatter, reduce           direct; ring on request
//   all_gather, broadcast            copies; ring on request
//   gather, scatter, all_to_all      copies
//   all_gather, all_to_all           without a kernel on request (cuda/launch/copy_engine.h)
//
// A launch that holds every rank of the communicator knows all pointers and begins when every input is ready. Then
// direct and copies are plain kernels that wait for no other block, and may fill the GPU.
#pragma once

#include <cstdint>

#include "core/engine.h"
#include "cuda/device/args.h"
#include "cuda/tuning/table.h"

#if defined(RINGCOMM_EMULATE)
#include "emulator.h"
#endif

namespace ringcomm::cuda {

// Of a block. Every thread of the emulator is a fiber, hence few of them there.
inline constexpr int kMostBlockThreads = 512;
#if defined(RINGCOMM_EMULATE)
inline constexpr int kBlockThreadsStep = emulator::kWarp;
inline constexpr int kUsualBlockThreads = emulator::kWarp > 16 ? emulator::kWarp : 16;
#else
inline constexpr int kBlockThreadsStep = 32;
inline constexpr int kUsualBlockThreads = kMostBlockThreads;
#endif

// The facts that all ranks of a communicator share.
struct Setting {
  Layout layout;
  int usual_channels = kUsualChannels;  // of a plan for which the tuning names no number
  bool known = false;                   // a launch holds all ranks
  bool whole_lines = false;  // 128 bytes written by a warp arrive whole at every peer, as on one device and over NVLink
  int ranks_of_a_device = 1;  // the most that share one
  int threads = 0;            // of a block; 0: the plan's choice. RINGCOMM_CUDA_THREADS

  // Of a block of a kernel that no plan is made for.
  int block_threads() const { return threads ? threads : kUsualBlockThreads; }
};
// Returns RINGCOMM_CUDA_THREADS, checked; 0 without it.
int threads_from_environment();
// For tests on one device. kApart: ranks in one launch still wait for each other's flags, as ranks in separate launches
// do. kPrivate: in addition user memory counts as not visible to the other ranks, so that it takes the staged path of
// ranks on several devices.
enum class Separation { kNo, kApart, kPrivate };
// Returns RINGCOMM_CUDA_APART, which is 0, 1 or 2, checked.
Separation apart_from_environment();

struct Plan {
  Algorithm algorithm = Algorithm::kDirect;
  bool wide_packets = false;
  bool waits = true;   // blocks wait for each other: all must be on the device at once
  bool known = false;  // the kernel gets all pointers
  int channels = 1;    // at most; of a plan that waits for nobody: blocks of one rank
  int threads = kUsualBlockThreads;
};

// Bytes of the whole message: of reduce_scatter, all_gather and all_to_all that of all parts.
std::uint64_t message_bytes(const Call& call, int world_size);

// The plan of a call of `nbytes`. `packets`: oneshot has a kernel for it. `copies_apart`: a known launch may not copy
// freely, for an all_to_all is in place.
Plan make_plan(Op op, Algorithm requested, std::uint64_t nbytes, bool packets, bool copies_apart,
               const Setting& setting, const Tuning& tuning);

// Most channels of a plan that waits, where one device has room for `blocks` of its kernel and `ranks` ranks; 0: not
// even one of each.
int channels_that_fit(const Plan& plan, int blocks, int ranks);

// Most channels of a send/recv link of a rank that has room for `blocks` of the kernel. Messages of all links may be
// under way at once, in launches that wait for the peers' launches: together they leave room for a collective, or half
// of it where there is little.
int link_channels(const Layout& layout, int blocks);
// Channels of a message of `nbytes` on links of at most `most`.
int message_channels(std::uint64_t nbytes, int most);

// Elements that one oneshot launch serves.
std::uint64_t oneshot_elements(const Layout& layout, int channels, std::uint64_t element);

}  // namespace ringcomm::cuda
