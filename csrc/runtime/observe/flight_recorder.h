// The flight recorder: the last calls of one rank of one communicator, in a memory file of its process that other
// processes may read while this one hangs (/proc/<pid>/fd/*, "memfd:ringcomm-record"). It ends with the engine or the
// process.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "core/algorithm_counts.h"
#include "core/engine.h"
#include "core/sync.h"
#include "runtime/shared_memory.h"

namespace ringcomm {

inline constexpr const char* kRecordName = "ringcomm-record";

// A communicator's number, derived from its handles: the same on all of its ranks, different for other communicators.
std::uint64_t group_number(const std::vector<std::string>& handles);

enum class CallState : std::uint8_t { kInFlight, kDone, kFailed, kRefused, kEnqueued };
const char* name(CallState state);

// The memory file: the head, the totals, the counts by chosen algorithm, the waits, and from `entries_at` on the last
// calls.
struct RecordHead {
  std::uint64_t magic;
  std::uint32_t entry_bytes, capacity;
  std::int32_t pid, rank, world_size;
  std::uint32_t state;       // 0 open, 1 closed, 2 part of another engine that has its own record
  std::uint32_t entries_at;  // offset in the file
  std::uint32_t waits;       // 1: the engine counts how long it waits for each peer
  std::uint64_t group;       // group_number; 0 before it is connected
  std::int64_t epoch_ns;     // added to a time, gives the time since 1970
  Flag calls;                // number of calls begun so far
  char engine[16], host[64];
};

// All calls so far of one op with one algorithm, as the callers asked for it.
struct CallTotals {
  Flag calls;   // begun, without those that were refused
  Flag failed;  // of them
  Flag bytes;   // this rank's messages: the larger of a call's input and output
  Flag ns;      // from begin to end; devices: not known
};

struct CallRecord {
  Flag number;               // number of the call, from 1; 0 while the entry is being written
  std::uint64_t collective;  // number among the collectives, from 0; kMessage for others
  std::int64_t begin_ns, end_ns, step;
  std::uint64_t count;  // the agreed count, see core/call/check.h; for a message its own
  std::uint64_t bytes;  // as in CallTotals
  std::int32_t root, tag;
  std::uint8_t op, dtype, reduce_op, algorithm, state, async;  // the algorithm that was asked for
  char site[58];
};
static_assert(sizeof(CallRecord) == 128, "an entry is two cache lines");

// A call that was begun: what its end needs, also when newer calls have taken its entry.
struct BegunCall {
  std::uint64_t number, collective, bytes;  // as in CallRecord
  std::int64_t begin_ns;
  CallTotals* totals;
};

class FlightRecorder {
 public:
  static constexpr std::uint64_t kMessage = ~std::uint64_t{0};

  // The number of calls that a flight recorder keeps: RINGCOMM_RECORD, else 256. With 0 nothing is recorded.
  static std::uint32_t capacity_asked_for();

  FlightRecorder(const Engine& engine, std::uint32_t capacity);

  // Where the engine adds its waits for each peer, in ns; the memory lives as long as the recorder.
  Flag* waits() const { return reinterpret_cast<Flag*>(memory_.data() + kWaits); }
  void has_waits() { head().waits = 1; }
  // Where the engine counts collectives by the algorithm that it chooses; see core/algorithm_counts.h.
  Flag* algorithms() const { return reinterpret_cast<Flag*>(memory_.data() + kAlgorithms); }
  // Sets the group number from the handles, which are the same on all ranks of a communicator.
  void connected(const std::vector<std::string>& handles);
  BegunCall begin(const Call& call, bool async);
  void end(const BegunCall& call, CallState state);
  // Adds the place in the user's code of a call for which `begin` did not get it.
  void place(std::uint64_t number, const char* site);
  void closed() {
    if (head().state == 0) head().state = 1;
  }
  void absorbed() { head().state = 2; }
  std::uint64_t group() const { return head().group; }

 private:
  RecordHead& head() const { return *reinterpret_cast<RecordHead*>(memory_.data()); }
  CallRecord& entry(std::uint64_t number) const {
    return reinterpret_cast<CallRecord*>(memory_.data() + head().entries_at)[number % head().capacity];
  }
  CallTotals& totals(const CallRecord& e) const {
    return reinterpret_cast<CallTotals*>(memory_.data() + kTotals)[e.op * kRecordedAlgorithms + e.algorithm];
  }
  static constexpr std::size_t kTotals = 256;  // offset in the file
  static constexpr std::size_t kAlgorithms = kTotals + sizeof(CallTotals) * kRecordedOps * kRecordedAlgorithms;
  static constexpr std::size_t kWaits = kAlgorithms + sizeof(Flag) * kAlgorithmCounts;
  static_assert(sizeof(RecordHead) <= kTotals, "the head has its place before the totals");
  static std::size_t entries_at(int world_size) {
    return round_up(kWaits + sizeof(Flag) * static_cast<std::size_t>(world_size), sizeof(CallRecord));
  }
  friend struct RecordText;

  SharedMemory memory_;
  std::uint64_t collectives_ = 0;
};

// Calls of this thread without their place in the user's code. It is looked up only if they take long, or fail.
class UnlocatedCalls {
 public:
  // Null: nothing is recorded. `calls` must outlive this object.
  UnlocatedCalls(FlightRecorder* recorder, const BegunCall* calls, std::size_t count);
  ~UnlocatedCalls();
  UnlocatedCalls(const UnlocatedCalls&) = delete;
  // Gives this thread's calls their place, once. Null: looks it up.
  static void place(const char* site = nullptr);

 private:
  FlightRecorder* recorder_;
  const BegunCall* const calls_;
  const std::size_t count_;
  UnlocatedCalls* const outer_;
};

// The contents of a flight recorder's memory file, for display: facts, and the calls from old to new.
struct RecordText {
  using Fact = std::variant<std::int64_t, std::string>;
  using Facts = std::map<std::string, Fact>;
  Facts facts;
  std::vector<Facts> calls;
  std::vector<Facts> totals;         // of the ops and algorithms that were called
  std::vector<Facts> chosen;         // for each of the totals: the number of calls by chosen algorithm
  std::vector<std::int64_t> waited;  // ns for each peer; empty: not known

  // Throws kInvalid for anything but a flight recorder's memory of this version. The calls are most of the work.
  static RecordText read(const std::string& bytes, bool with_calls);
  // The group number in the first bytes of a memory file, sizeof(RecordHead) of them; 0 for anything else.
  static std::int64_t group(const std::string& head);
};

}  // namespace ringcomm
