// How the first `threads` threads of a block move a run of bytes: thread t takes the 16-byte vectors t, t + threads,
// ..., a batch at a time, and issues all loads of a batch before its first store. A run whose ends are not all aligned
// to 16 bytes moves in smaller pieces.
#pragma once

#include <type_traits>

#include "core/schedule.h"
#include "cuda/device/block.h"

#if defined(__CUDACC__)
#define RINGCOMM_UNROLL _Pragma("unroll")
#else
#define RINGCOMM_UNROLL
#endif

namespace ringcomm::cuda {

inline constexpr int kInFlight = 4;  // loads of each source that a thread has under way

// store(i, load(i)) for all i < count.
template <int kDeep, typename Load, typename Store>
RINGCOMM_DEVICE void in_flight(u32 thread, u32 threads, u32 count, const Load& load, const Store& store) {
  decltype(load(thread)) value[kDeep];
  u32 i = thread;
  for (; i + (kDeep - 1) * threads < count; i += kDeep * threads) {
    RINGCOMM_UNROLL for (int k = 0; k < kDeep; ++k) value[k] = load(i + k * threads);
    RINGCOMM_UNROLL for (int k = 0; k < kDeep; ++k) store(i + k * threads, value[k]);
  }
  if (i >= count) return;
  RINGCOMM_UNROLL for (int k = 0; k < kDeep - 1; ++k) if (i + k * threads < count) value[k] = load(i + k * threads);
  RINGCOMM_UNROLL for (int k = 0; k < kDeep - 1; ++k) if (i + k * threads < count) store(i + k * threads, value[k]);
}

template <typename Unit>
RINGCOMM_DEVICE Unit get(const char* from, u32 i) {
  if constexpr (std::is_same_v<Unit, Vec>)
    return load(reinterpret_cast<const Vec*>(from) + i);
  else
    return load_one(reinterpret_cast<const Unit*>(from) + i);
}
template <typename Unit>
RINGCOMM_DEVICE void put(char* to, u32 i, const Unit& value) {
  if constexpr (std::is_same_v<Unit, Vec>)
    store(reinterpret_cast<Vec*>(to) + i, value);
  else
    store_one(reinterpret_cast<Unit*>(to) + i, value);
}

// The targets of a run: every address that `each(f)` passes to f, plus `offset` bytes.
template <typename Each>
struct Targets {
  const Each& each;
  u64 offset;

  RINGCOMM_DEVICE u64 address_bits() const {
    u64 bits = 0;
    each([&](char* to) { bits |= reinterpret_cast<u64>(to) + offset; });
    return bits;
  }
  template <typename Unit>
  RINGCOMM_DEVICE void put_all(u32 i, const Unit& value) const {
    each([&](char* to) { put(to + offset, i, value); });
  }
};
template <typename Each>
RINGCOMM_DEVICE Targets<Each> targets(const Each& each, u64 offset = 0) {
  return {each, offset};
}

template <typename Unit, int kDeep, typename Each>
RINGCOMM_DEVICE void copy_units(u32 threads, const char* from, u32 first, u32 count, const Targets<Each>& to) {
  in_flight<kDeep>(
      threadIdx.x, threads, count, [&](u32 i) { return get<Unit>(from, first + i); },
      [&](u32 i, const Unit& value) { to.put_all(first + i, value); });
}

// Copies `from` to every target.
template <typename Each>
RINGCOMM_DEVICE void copy_to_all(u32 threads, const char* from, u32 nbytes, const Targets<Each>& to) {
  const u64 bits = reinterpret_cast<u64>(from) | to.address_bits();
  if (bits % 16 == 0) {
    copy_units<Vec, kInFlight>(threads, from, 0,
                               nbytes / 16 + (RINGCOMM_FAULT == Fault::kTailRoundedUp && nbytes % 16 != 0), to);
  } else if (bits % 4 == 0) {
    copy_units<u32, kInFlight>(threads, from, 0, nbytes / 4, to);
  } else {
    return copy_units<std::uint8_t, kInFlight>(threads, from, 0, nbytes, to);
  }
  const u32 done = nbytes / (bits % 16 == 0 ? 16 : 4) * (bits % 16 == 0 ? 16 : 4);
  copy_units<std::uint8_t, 1>(threads, from, done, nbytes - done, to);
}
// Copies to `to`, and to `and_to` if it is not null.
RINGCOMM_DEVICE_CALL void copy_to_both(u32 threads, const char* from, u32 nbytes, char* to, char* and_to) {
  copy_to_all(threads, from, nbytes, targets([&](const auto& f) {
                f(to);
                if (and_to) f(and_to);
              }));
}

RINGCOMM_DEVICE void copy_run(const Block& block, const char* from, u64 nbytes, char* to) {
  copy_to_both(block.threads(), from, static_cast<u32>(nbytes), to, nullptr);
}

// A run that all channels share, in tiles that they take in turn, beginning with channel `turn`.
template <typename Each>
RINGCOMM_DEVICE void copy_tiles(int turn, const char* from, u64 nbytes, const Each& each) {
  const u64 channels = gridDim.x, vectors = 16ull * blockDim.x;
  const u64 share = ceil_div(ceil_div(nbytes, channels), kLineBytes) * kLineBytes;
  const u64 tile = larger(vectors, smaller(kInFlight * vectors, share));
  const u64 mine = (blockIdx.x + channels - static_cast<u64>(turn) % channels) % channels;
  for (u64 at = mine * tile; at < nbytes; at += channels * tile)
    copy_to_all(blockDim.x, from + at, static_cast<u32>(smaller(tile, nbytes - at)), targets(each, at));
}

// ---- windows --------------------------------------------------------------------------------------------------------

// A message that `channels` blocks share: window w belongs to block w % channels. Every channel has the same number of
// windows. A window has at most `most` elements per chunk, and not much less than `kLeastBytes`.
inline constexpr std::size_t kLeastBytes = 1024;

RINGCOMM_HD constexpr WindowCut cut_for_channels(std::size_t count, int chunks, std::size_t most, std::size_t align,
                                                 std::size_t least, int channels) {
  const std::size_t each = ceil_div(ceil_div(count, chunks), channels);
  const std::size_t rounds = larger(1, ceil_div(each, most));  // windows of every channel
  const std::size_t even = ceil_div(ceil_div(each, rounds), align) * align;
  return {count, chunks, smaller(most, larger(even, larger(align, smaller(least, most / align * align))))};
}

}  // namespace ringcomm::cuda
