// Whether slots are written past the caches. Within one cache complex ordinary stores are faster; between complexes
// the lines of a slot travel between two caches at a fraction of the speed of memory, when they are written or when
// they are read. Threads move, and a virtual machine does not say where they are, so both sides measure: a writer by
// itself, and a reader by telling the writer what it would rather have. Only speed depends on it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm::cpu {

// What one side thinks of writing through the caches.
class RateMeter {
 public:
  static constexpr std::size_t kLeastBytes = 4096;  // smaller slots stay in the caches
  static constexpr double kSlowBytesPerNs = 4.5;    // GB/s
  static constexpr int kStreak = 4;                 // a single slow one may have been interrupted

  // A slot of `nbytes`, written through the caches, took `ns` to write or read.
  void record(std::size_t nbytes, std::int64_t ns) {
    const bool slow = static_cast<double>(nbytes) < kSlowBytesPerNs * static_cast<double>(ns);
    if (slow == wants_streaming_) {
      streak_ = 0;
    } else if (++streak_ >= (slow ? kStreak : 2)) {
      wants_streaming_ = slow;
      streak_ = 0;
    }
  }
  bool wants_streaming() const { return wants_streaming_; }

 private:
  bool wants_streaming_ = false;
  int streak_ = 0;
};

// Reading the clock costs something beside a small slot: of those, one in so many is measured.
inline constexpr std::size_t kAlwaysMeasuredBytes = 32u << 10;
inline constexpr std::uint64_t kSampleInterval = 8;

constexpr bool is_measured(std::uint64_t ticket, std::size_t nbytes) {
  return nbytes >= kAlwaysMeasuredBytes || (nbytes >= RateMeter::kLeastBytes && ticket % kSampleInterval == 0);
}

// While streaming, one slot in so many is written through the caches all the same, so that the readers can see
// whether that has become fast.
inline constexpr std::uint64_t kProbeInterval = 64;

}  // namespace ringcomm::cpu
