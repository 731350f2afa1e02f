#include "runtime/observe/flight_recorder.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/call/check.h"
#include "core/call/parts.h"
#include "runtime/checksum.h"
#include "runtime/clock.h"
#include "runtime/observe/site.h"

namespace ringcomm {

namespace {

constexpr std::uint64_t kMagic = 0x72696e6772656333;  // "ringrec3"
constexpr std::uint32_t kDefaultCapacity = 256, kMostCapacity = 1 << 20;

template <std::size_t N>
std::string text_of(const char (&from)[N]) {
  return std::string(from, strnlen(from, N));
}

// The count of a call that has not been checked yet.
std::uint64_t count_of(const Call& call, int world_size) {
  const auto whole = [&](const std::vector<Part>& parts) {
    return parts.empty() || parts.size() == static_cast<std::size_t>(world_size);
  };
  const bool agree = !point_to_point(call.op) && whole(call.input_parts) && whole(call.output_parts);
  return agree ? agreed_count(call, world_size) : call.count;
}

// The bytes of this rank's message, before the call was checked: the larger of its input and its output.
std::uint64_t bytes_of(const Call& call, int rank, int world_size) {
  const bool at_root = call.root == rank;
  const auto side = [&](const std::vector<Part>& list, bool in_parts) {
    std::uint64_t count = in_parts ? call.count * static_cast<std::uint64_t>(world_size) : call.count;
    if (!list.empty()) count = 0;
    for (const Part& part : list) count += part.count;
    return count;
  };
  const bool parts_in =
      call.op == Op::kReduceScatter || call.op == Op::kAllToAll || (call.op == Op::kScatter && at_root);
  const bool parts_out = call.op == Op::kAllGather || call.op == Op::kAllToAll || (call.op == Op::kGather && at_root);
  const std::uint64_t count = std::max(side(call.input_parts, parts_in), side(call.output_parts, parts_out));
  return count * element_bytes(call.dtype);
}

template <typename Enum>
std::string name_of(std::uint8_t value, Enum last) {
  return value <= static_cast<std::uint8_t>(last) ? name(static_cast<Enum>(value)) : "?";
}

}  // namespace

const char* name(CallState state) {
  switch (state) {
    case CallState::kInFlight:
      return "in flight";
    case CallState::kDone:
      return "done";
    case CallState::kFailed:
      return "failed";
    case CallState::kRefused:
      return "refused";
    case CallState::kEnqueued:
      return "enqueued";
  }
  return "?";
}

std::uint64_t group_number(const std::vector<std::string>& handles) {
  std::uint64_t hash = fingerprint({});
  for (const std::string& handle : handles) hash = fingerprint(handle + '\n', hash);
  return hash >> 1;  // fits the integers of Python and JSON
}

std::uint32_t FlightRecorder::capacity_asked_for() {
  const char* const text = std::getenv("RINGCOMM_RECORD");
  if (!text || !*text) return kDefaultCapacity;
  char* end = nullptr;
  const unsigned long asked = std::strtoul(text, &end, 10);
  if (*end || *text < '0' || *text > '9' || asked > kMostCapacity)
    fail(ErrorCode::kInvalid, "Engine: expected a number of calls from 0 to ", kMostCapacity,
         " in RINGCOMM_RECORD, got \"", text, "\"; leave it out for ", kDefaultCapacity);
  return static_cast<std::uint32_t>(asked);
}

FlightRecorder::FlightRecorder(const Engine& engine, std::uint32_t capacity)
    : memory_(SharedMemory::create(kRecordName, entries_at(engine.world_size()) + capacity * sizeof(CallRecord))) {
  RecordHead& h = head();
  h.entry_bytes = sizeof(CallRecord);
  h.capacity = capacity;
  h.pid = getpid();
  h.rank = engine.rank();
  h.world_size = engine.world_size();
  h.entries_at = static_cast<std::uint32_t>(entries_at(h.world_size));
  h.epoch_ns = nanoseconds(CLOCK_REALTIME) - now_ns();
  copy_end(h.engine, sizeof h.engine, engine.kind());
  gethostname(h.host, sizeof h.host - 1);
  store_release(&h.magic, kMagic);  // from now on it can be read
}

void FlightRecorder::connected(const std::vector<std::string>& handles) { head().group = group_number(handles); }

BegunCall FlightRecorder::begin(const Call& call, bool async) {
  const std::uint64_t number = fetch_add(&head().calls, 1) + 1;
  CallRecord& e = entry(number);
  store_release(&e.number, 0);
  e.collective = point_to_point(call.op) ? kMessage : fetch_add(&collectives_, 1);
  e.begin_ns = now_ns();
  e.end_ns = 0;
  e.step = step_now();
  e.count = count_of(call, head().world_size);
  e.bytes = bytes_of(call, head().rank, head().world_size);
  e.root = call.root;
  e.tag = call.tag;
  e.op = static_cast<std::uint8_t>(call.op);
  e.dtype = static_cast<std::uint8_t>(call.dtype);
  e.reduce_op = static_cast<std::uint8_t>(call.reduce_op);
  e.algorithm = static_cast<std::uint8_t>(call.algorithm);
  e.state = static_cast<std::uint8_t>(CallState::kInFlight);
  e.async = async;
  copy_end(e.site, sizeof e.site, call.site ? call.site : "");
  CallTotals& t = totals(e);
  fetch_add(&t.calls, 1);
  fetch_add(&t.bytes, e.bytes);
  const BegunCall begun{number, e.collective, e.bytes, e.begin_ns, &t};
  store_release(&e.number, number);
  return begun;
}

void FlightRecorder::end(const BegunCall& call, CallState state) {
  const bool refused = state == CallState::kRefused;
  if (refused && call.collective != kMessage)
    claim(&collectives_, call.collective + 1, call.collective);  // the other ranks do not count it
  CallTotals& t = *call.totals;
  if (refused) {
    fetch_add(&t.calls, static_cast<std::uint64_t>(-1));
    fetch_add(&t.bytes, static_cast<std::uint64_t>(-1) * call.bytes);
  }
  if (state == CallState::kFailed) fetch_add(&t.failed, 1);
  const std::int64_t end_ns = state == CallState::kEnqueued ? 0 : now_ns();
  if (end_ns != 0 && !refused) fetch_add(&t.ns, static_cast<std::uint64_t>(end_ns - call.begin_ns));
  CallRecord& e = entry(call.number);
  if (load_acquire(&e.number) != call.number) return;  // a newer call has taken the entry
  e.end_ns = end_ns;
  e.state = static_cast<std::uint8_t>(state);
}

void FlightRecorder::place(std::uint64_t number, const char* site) {
  CallRecord& e = entry(number);
  if (load_acquire(&e.number) == number) copy_end(e.site, sizeof e.site, site);
}

namespace {
thread_local UnlocatedCalls* unplaced = nullptr;  // the innermost one of this thread
}

UnlocatedCalls::UnlocatedCalls(FlightRecorder* recorder, const BegunCall* calls, std::size_t count)
    : recorder_(recorder), calls_(calls), count_(count), outer_(unplaced) {
  unplaced = this;
}

UnlocatedCalls::~UnlocatedCalls() { unplaced = outer_; }

void UnlocatedCalls::place(const char* site) {
  FlightRecorder* const recorder = unplaced ? std::exchange(unplaced->recorder_, nullptr) : nullptr;
  if (!recorder) return;
  if (!site) site = site_here();
  for (std::size_t i = 0; i < unplaced->count_; ++i) recorder->place(unplaced->calls_[i].number, site);
}

std::int64_t RecordText::group(const std::string& head) {
  RecordHead h;
  const bool headed = head.size() >= sizeof h && (std::memcpy(&h, head.data(), sizeof h), h.magic == kMagic);
  return headed ? static_cast<std::int64_t>(h.group) : 0;
}

RecordText RecordText::read(const std::string& bytes, bool with_calls) {
  RecordHead h;
  const bool headed =
      bytes.size() >= FlightRecorder::kWaits && (std::memcpy(&h, bytes.data(), sizeof h), h.magic == kMagic);
  if (!headed || h.entry_bytes != sizeof(CallRecord) || h.capacity == 0 || h.world_size < 1 ||
      h.entries_at != FlightRecorder::entries_at(h.world_size) || h.entries_at > bytes.size() ||
      (bytes.size() - h.entries_at) / sizeof(CallRecord) < h.capacity)
    fail(ErrorCode::kInvalid, "record: expected the record of a communicator of this version, got ", bytes.size(),
         " bytes of something else; read it with the version of ringcomm that writes it");
  RecordText text;
  text.facts = {{"pid", std::int64_t{h.pid}},
                {"rank", std::int64_t{h.rank}},
                {"world_size", std::int64_t{h.world_size}},
                {"group", static_cast<std::int64_t>(h.group)},
                {"state", std::int64_t{h.state}},
                {"calls", static_cast<std::int64_t>(h.calls)},
                {"engine", text_of(h.engine)},
                {"host", text_of(h.host)}};
  const auto time_of = [&](std::int64_t ns) {  // untrusted bytes: the sum may overflow
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(ns) + static_cast<std::uint64_t>(h.epoch_ns));
  };
  std::vector<CallRecord> entries(with_calls ? h.capacity : 0);
  std::memcpy(entries.data(), bytes.data() + h.entries_at, entries.size() * sizeof(CallRecord));
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.number < b.number; });
  for (const CallRecord& e : entries) {
    if (e.number == 0) continue;
    text.calls.push_back({{"number", static_cast<std::int64_t>(e.number)},
                          {"collective", static_cast<std::int64_t>(e.collective)},
                          {"op", name_of(e.op, Op::kProbe)},
                          {"dtype", name_of(e.dtype, DType::kComplex128)},
                          {"reduce_op", name_of(e.reduce_op, ReduceOp::kBxor)},
                          {"algorithm", name_of(e.algorithm, Algorithm::kCopyEngine)},
                          {"count", static_cast<std::int64_t>(e.count)},
                          {"root", std::int64_t{e.root}},
                          {"tag", std::int64_t{e.tag}},
                          {"state", name_of(e.state, CallState::kEnqueued)},
                          {"async", std::int64_t{e.async}},
                          {"step", e.step},
                          {"begin_ns", time_of(e.begin_ns)},
                          {"end_ns", e.end_ns ? time_of(e.end_ns) : 0},
                          {"site", text_of(e.site)}});
  }
  for (int i = 0; i < kRecordedOps * kRecordedAlgorithms; ++i) {
    CallTotals t;
    std::memcpy(&t, bytes.data() + FlightRecorder::kTotals + i * sizeof t, sizeof t);
    if (t.calls == 0) continue;
    text.totals.push_back({{"op", name(static_cast<Op>(i / kRecordedAlgorithms))},
                           {"algorithm", name(static_cast<Algorithm>(i % kRecordedAlgorithms))},
                           {"calls", static_cast<std::int64_t>(t.calls)},
                           {"failed", static_cast<std::int64_t>(t.failed)},
                           {"bytes", static_cast<std::int64_t>(t.bytes)},
                           {"ns", static_cast<std::int64_t>(t.ns)}});
    Facts& chosen = text.chosen.emplace_back();
    for (int used = 1; used <= kAlgorithmsUsed; ++used) {
      const auto algorithm = static_cast<Algorithm>(used);
      const std::size_t at = algorithm_count_at(i / kRecordedAlgorithms, i % kRecordedAlgorithms, algorithm);
      Flag calls;
      std::memcpy(&calls, bytes.data() + FlightRecorder::kAlgorithms + at * sizeof calls, sizeof calls);
      if (calls) chosen[name(algorithm)] = static_cast<std::int64_t>(calls);
    }
  }
  if (h.waits) {
    text.waited.resize(static_cast<std::size_t>(h.world_size));
    std::memcpy(text.waited.data(), bytes.data() + FlightRecorder::kWaits, sizeof(Flag) * text.waited.size());
  }
  return text;
}

}  // namespace ringcomm
