// Decides whether slots are written with streaming stores, which bypass the caches. Within one cache complex ordinary
// stores are faster. Between complexes the lines of a slot travel between two caches at a fraction of the speed of
// memory, when they are written or when they are read. Threads move, and a virtual machine does not show where they
// run, so both sides measure both kinds of slots: a writer its own writes, and a reader its reads, which it tells the
// writer. The writer takes the kind that costs less, its write and the slowest read together, and writes a slot of the
// other kind now and then, to measure it again. Only the speed depends on this.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/sync.h"

namespace ringcomm::cpu {

inline constexpr std::size_t kLeastStreamedBytes = 4096;  // smaller slots stay in the caches
// Messages up to this size are in the caches at both ends. Of larger ones memory limits both kinds of slots, so that
// their costs are noted separately.
inline constexpr std::size_t kCachedMessageBytes = 1u << 20;
constexpr int cost_class(std::size_t message_bytes) { return message_bytes > kCachedMessageBytes; }
inline constexpr int kCostClasses = 2;

// The recent cost of slots, in ns per KiB; 0: not measured yet.
struct SlotCosts {
  float cached = 0, streamed = 0;

  bool known() const { return cached > 0 && streamed > 0; }
  // The cheapest of the last slots counts, because an interruption only adds time. Each slot that costs more raises the
  // cost by at most an eighth.
  void record(bool was_streamed, std::size_t nbytes, std::int64_t ns) {
    float& cost = was_streamed ? streamed : cached;
    const float sample = static_cast<float>(ns > 0 ? ns : 1) * 1024 / static_cast<float>(nbytes);
    const float most = cost > 0 ? cost * 1.125f : sample;
    cost = sample < most ? sample : most;
  }
  // Whether a difference is worth telling the writer.
  bool differs(const SlotCosts& other) const {
    const auto far = [](float a, float b) { return a > b * 1.125f || b > a * 1.125f; };
    return far(cached, other.cached) || far(streamed, other.streamed);
  }
  std::uint64_t packed() const {
    const float both[2] = {cached, streamed};
    std::uint64_t word;
    static_assert(sizeof word == sizeof both, "both costs fit one word");
    std::memcpy(&word, both, sizeof word);
    return word;
  }
  static SlotCosts unpacked(std::uint64_t word) {
    float both[2];
    std::memcpy(both, &word, sizeof word);
    return {both[0], both[1]};
  }
};

// Reading the clock takes noticeable time compared with a small slot, so only every kSampleInterval-th one is measured.
inline constexpr std::size_t kAlwaysMeasuredBytes = 32u << 10;
inline constexpr unsigned kSampleInterval = 8;

template <typename Work>
std::int64_t ns_of(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count();
}

// How one rank's slots are written.
class SlotWriting {
 public:
  // Returns whether the next slot is to be written with streaming stores. `reading`: what it costs the slowest reader.
  bool next(std::size_t message_bytes, const SlotCosts& reading) {
    const SlotCosts& writing = costs_[cost_class(message_bytes)];
    const bool known = writing.known() && reading.known();
    const bool streaming = known && (writing.streamed + reading.streamed) * kMargin < writing.cached + reading.cached;
    unsigned& slots = slots_[cost_class(message_bytes)];
    const unsigned seldom = slots < kFirstSlots ? kFirstInterval : kStreamedInterval;
    return (++slots % (streaming ? kCachedInterval : seldom) == 0) != streaming;
  }
  // Whether a write is to be measured.
  bool measures(bool streamed, std::size_t nbytes) {
    const bool other = streamed != std::exchange(last_, streamed);
    return nbytes >= kAlwaysMeasuredBytes || other || ++writes_ % kSampleInterval == 0;
  }
  void record(std::size_t message_bytes, bool streamed, std::size_t nbytes, std::int64_t ns) {
    costs_[cost_class(message_bytes)].record(streamed, nbytes, ns);
  }

 private:
  static constexpr float kMargin = 1.1f;
  // One slot in every interval is of the other kind. The intervals are prime, so that a program's loop does not always
  // hit the same slot. A slot that is streamed without need costs up to five times as much. The first slots tell
  // little, because pages may be new and caches are cold.
  static constexpr unsigned kFirstSlots = 512, kFirstInterval = 17, kStreamedInterval = 509, kCachedInterval = 61;

  SlotCosts costs_[kCostClasses];
  unsigned slots_[kCostClasses] = {}, writes_ = 0;
  bool last_ = false;
};

// The cost of one rank's reads of another rank's slots.
class SlotReading {
 public:
  // Whether a read is to be measured.
  bool measures(bool streamed, std::size_t nbytes) {
    const bool other = streamed != std::exchange(last_, streamed);
    return nbytes >= kAlwaysMeasuredBytes || other || ++reads_ % kSampleInterval == 0;
  }
  // Reports costs that have changed to the writer: stores them into `told`, by class.
  void record(std::size_t message_bytes, bool streamed, std::size_t nbytes, std::int64_t ns, Flag* told) {
    const int kind = cost_class(message_bytes);
    costs_[kind].record(streamed, nbytes, ns);
    if (!costs_[kind].known() || !costs_[kind].differs(told_[kind])) return;
    told_[kind] = costs_[kind];
    store_relaxed(&told[kind], costs_[kind].packed());
  }

 private:
  SlotCosts costs_[kCostClasses], told_[kCostClasses];
  unsigned reads_ = 0;
  bool last_ = false;
};

}  // namespace ringcomm::cpu
