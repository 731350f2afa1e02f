// The flight recorder: the last calls of one rank of one communicator, in a memory file of its process that other
// processes may read while this one hangs (/proc/<pid>/fd/*, "memfd:ringcomm-record"). It ends with the engine or the
// process.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "core/engine.h"
#include "core/sync.h"
#include "runtime/shared_memory.h"

namespace ringcomm {

inline constexpr const char* kRecordName = "ringcomm-record";

// A communicator's number, derived from its handles: the same on all of its ranks, different for other communicators.
std::uint64_t group_number(const std::vector<std::string>& handles);

enum class CallState : std::uint8_t { kInFlight, kDone, kFailed, kRefused, kEnqueued };
const char* name(CallState state);

struct RecordHead {
  std::uint64_t magic;
  std::uint32_t entry_bytes, capacity;
  std::int32_t pid, rank, world_size;
  std::uint32_t state;    // 0 open, 1 closed, 2 part of another engine that has its own record
  std::uint64_t group;    // group_number; 0 before it is connected
  std::int64_t epoch_ns;  // added to a time, gives the time since 1970
  Flag calls;             // number of calls begun so far
  char engine[16], host[64];
};

struct CallRecord {
  Flag number;               // number of the call, from 1; 0 while the entry is being written
  std::uint64_t collective;  // number among the collectives, from 0; kMessage for others
  std::int64_t begin_ns, end_ns, step;
  std::uint64_t count;  // the agreed count, see core/check.h; for a message its own
  std::int32_t root, tag;
  std::uint8_t op, dtype, reduce_op, algorithm, state, async;
  char site[66];
};
static_assert(sizeof(CallRecord) == 128, "an entry is two cache lines");

class FlightRecorder {
 public:
  static constexpr std::uint64_t kMessage = ~std::uint64_t{0};

  // The number of calls that a flight recorder keeps: RINGCOMM_RECORD, else 256. With 0 nothing is recorded.
  static std::uint32_t capacity_asked_for();

  FlightRecorder(const Engine& engine, std::uint32_t capacity);

  // Sets the group number from the handles, which are the same on all ranks of a communicator.
  void connected(const std::vector<std::string>& handles);
  // Returns the number of the call.
  std::uint64_t begin(const Call& call, bool async);
  void end(std::uint64_t number, CallState state);
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
    return reinterpret_cast<CallRecord*>(memory_.data() + kEntries)[number % head().capacity];
  }
  static constexpr std::size_t kEntries = 256;  // size of the header
  static_assert(sizeof(RecordHead) <= kEntries, "the head has its place before the entries");
  friend struct RecordText;

  SharedMemory memory_;
  std::uint64_t collectives_ = 0;
};

// Calls of this thread without their place in the user's code. It is looked up only if they take long, or fail.
class Unplaced {
 public:
  // Null: nothing is recorded. `numbers` must outlive this object.
  Unplaced(FlightRecorder* recorder, const std::uint64_t* numbers, std::size_t count);
  ~Unplaced();
  Unplaced(const Unplaced&) = delete;
  // Gives this thread's calls their place, once. Null: looks it up.
  static void place(const char* site = nullptr);

 private:
  FlightRecorder* recorder_;
  const std::uint64_t* const numbers_;
  const std::size_t count_;
  Unplaced* const outer_;
};

// The contents of a flight recorder's memory file, for display: facts, and the calls from old to new.
struct RecordText {
  using Fact = std::variant<std::int64_t, std::string>;
  using Facts = std::map<std::string, Fact>;
  Facts facts;
  std::vector<Facts> calls;

  // Throws kInvalid for anything but a flight recorder's memory of this version.
  static RecordText read(const std::string& bytes);
};

}  // namespace ringcomm
