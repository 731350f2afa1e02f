// How a group waits, and how it ends: a rank is lost, times out, or makes a different call.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/scope_exit.h"
#include "cpu/group/state.h"
#include "runtime/clock.h"
#include "runtime/observe/flight_recorder.h"
#include "runtime/observe/site.h"

namespace ringcomm::cpu {

namespace {

constexpr auto kSignalPollInterval = std::chrono::milliseconds(25);
constexpr int kMostNamed = 8;  // most ranks named in a message

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 && name[0] ? name : "this host";
}

void copy_text(char* to, std::size_t nbytes, const char* text) {
  std::strncpy(to, text, nbytes - 1);
  to[nbytes - 1] = '\0';
}

std::string in_brackets(const std::string& text) { return text.empty() ? text : concat(" (", text, ')'); }

std::string place_of(const LoggedCall& call) {
  std::string text = load_acquire(&call.has_site) ? call.site : "";
  if (call.step >= 0) text += concat(text.empty() ? "" : ", ", "step ", call.step);
  return text;
}

}  // namespace

// ---- waiting -------------------------------------------------------------------------------------------------------

void Group::wait(int peer, const Flag* flag, std::uint64_t target, const Deadline& deadline) const {
  if (load_acquire(flag) >= target) return;
  Clock::time_point next{}, begin{}, counted{};
  const auto count_wait = [&] {  // until now
    if (!waited_ || begin == Clock::time_point{}) return;
    const auto since = std::max(begin, std::exchange(counted, Clock::now()));
    fetch_add(waited_.get() + peer, static_cast<std::uint64_t>(std::chrono::nanoseconds(counted - since).count()));
  };
  const ScopeExit count(count_wait);  // also if the wait throws
  const auto has_come = [&] { return load_acquire(flag) >= target; };
  LongWait watch(*this, WaitKind::kCollective, peer, deadline.timeout_ms, flag);
  wait_flag(flag, target, &control(peer).sleepers.value, wait_policy_, begin, [&] {
    wait_for(peer);
    watch.check(has_come);
    check_peers(peer, deadline, has_come);
    if (check_interrupt(*deadline.call, next)) count_wait();  // for readers of the metrics of a rank that hangs
  });
  wait_for(-1);
}

LongWait::~LongWait() {
  if (entry_) group_.graph_->end(entry_);
}

void LongWait::search(Clock::time_point now, const std::function<bool()>& has_come) {
  next_ = now + group_.graph_->long_wait() / kSearchesPerWait;
  if (limit_ms_ < kLeastLimitMs || peer_ < 0 || group_.graph_->long_wait().count() == 0) return;
  if (!entry_) entry_ = group_.graph_->begin(group_.member_, what_, group_.facts_of(kind_, peer_, site_));
  group_.graph_->search(entry_, group_.party_of(peer_), has_come, seen_);
}

PartyPlace Group::party_of(int peer) const {
  const Control& c = control(peer);
  return {load_acquire(&c.party.value), c.graph_nonce, peers_[peer].pid, c.graph_fd};
}

WaitFacts Group::facts_of(WaitKind kind, int peer, const char* site) const {
  WaitFacts facts;
  facts.group = origin_.group;
  facts.rank = rank_;
  facts.peer = peer;
  facts.target = party_of(peer);
  facts.kind = kind;
  if (kind == WaitKind::kItem) return facts;
  const char* const message = kind == WaitKind::kSend ? "send" : kind == WaitKind::kProbe ? "probe" : "recv";
  const std::string place = in_brackets(site ? site : "");
  const bool collective = kind == WaitKind::kCollective;
  const std::string here = collective ? call_here() : concat(message, ": rank ", rank_, place);
  copy_text(facts.here, sizeof facts.here, concat(here, " expected ", named(peer), " in this call").c_str());
  copy_text(facts.call, sizeof facts.call, (collective ? last_call_of(rank_) : message + place).c_str());
  return facts;
}

// The call needs every rank's part, so a lost rank is reported wherever this rank waits. After an abort the flag is
// checked once more: the peer may have done its part of this call before it aborted.
template <typename HasCome>
void Group::check_peers(int peer, const Deadline& deadline, const HasCome& has_come) const {
  if (aborted()) {
    if (has_come()) return;
    record_site();
    check_abort(*deadline.call);
  }
  compare_calls();
  check_lost(*deadline.call);
  if (deadline.passed() && !has_come()) report_timeout(peer, deadline);
}

// Throws if the call needs a rank that is gone.
void Group::check_lost(const Call& call) const {
  for (int other = 0; other < world_size_; ++other)
    if (holds_up(other) && is_gone(other) && holds_up(other)) {  // checked again: it may have ended the call in between
      const int lost = cause_of(other, true);
      fail_group(call, ErrorCode::kRankLost,
                 concat(call_here(), " expected ", named(lost), " in this call, but ", why_gone(lost), ", after ",
                        last_call_of(lost), "; see its own output"));
    }
}

// Aborts the group when a signal interrupts this rank, so that the others do not wait for it.
bool Group::check_interrupt(const Call& call, Clock::time_point& next) const {
  const auto now = Clock::now();
  const bool first = next == Clock::time_point{};
  if (!first && now < next) return false;
  next = now + kSignalPollInterval;  // checking for Python signals needs the GIL
  if (first) return false;
  UnlocatedCalls::place();
  if (!signals_.interrupted()) return true;
  interrupt(name(call.op));
  raise_end(call.op);
}

void Group::interrupt(const char* call) const {
  abort(concat(named(rank_), " was interrupted by a signal in ", call), ErrorCode::kAborted);
}

bool Group::holds_up(int peer) const { return peer != rank_ && load_acquire(&control(peer).ended.value) <= sequence_; }

// Blames the ranks that have not begun this call; if there are none, the ranks that a signal has stopped; else the peer
// for which this rank waits.
void Group::report_timeout(int peer, const Deadline& deadline) const {
  std::vector<int> late;
  const auto gather = [&](const auto& is_late) {
    if (late.empty())
      for (int p = 0; p < world_size_; ++p)
        if (p != rank_ && is_late(p)) late.push_back(p);
  };
  gather([&](int p) { return !has_begun(p, sequence_); });
  gather([&](int p) { return holds_up(p) && is_stopped(p); });
  gather([&](int p) { return p == peer; });
  const auto answer_of = [&](int p) {
    const bool any = has_begun(p, 0);
    return has_begun(p, sequence_) ? "no answer from it" : any ? "only " + last_call_of(p) : "no call from it";
  };
  std::string text = concat(call_here(), " expected ");
  const int named_ones = std::min<int>(static_cast<int>(late.size()), kMostNamed);
  for (int i = 0; i < named_ones; ++i) {
    const int p = late[i];
    const std::string held = held_up_by(p);
    text += concat(i ? " and " : "", named(p), held, held.empty() ? "" : ",", " in this call, got ", answer_of(p));
  }
  if (static_cast<int>(late.size()) > named_ones) text += concat(" and ", late.size() - named_ones, " more");
  text += concat(", within the timeout of ", deadline.timeout_ms / 1000.0,
                 " s; see whether it has stalled or calls something else");
  fail_group(*deadline.call, ErrorCode::kTimeout, text);
}

// ---- the state of each rank -----------------------------------------------------------------------------------------

void Group::begin_call(const Call& call, const Signature& signature) {
  sequence_ = signature.sequence;
  LoggedCall& entry = control().log[sequence_ % kLoggedCalls];
  entry.signature = signature;
  entry.step = step_now();
  if (call.site) copy_end(entry.site, sizeof entry.site, call.site);
  store_relaxed(&entry.has_site, call.site != nullptr);
  logged_ = (signature.hash() & ~0xffffull) | ((sequence_ + 1) & 0xffff);
  store_release(&entry.hash, logged_);
  store_release(&control().calls.value, sequence_ + 1);
}

// Looks up the place of the current call in the user's code, if the call came without one.
void Group::record_site() const {
  LoggedCall& entry = control().log[sequence_ % kLoggedCalls];
  if (!has_begun(rank_, sequence_) || load_relaxed(&entry.has_site)) return;
  copy_end(entry.site, sizeof entry.site, site_here());
  store_release(&entry.has_site, 1);
}

const LoggedCall& Group::logged(int peer, std::uint64_t sequence) const {
  return control(peer).log[sequence % kLoggedCalls];
}

bool Group::has_begun(int peer, std::uint64_t sequence) const {
  return load_acquire(&control(peer).calls.value) > sequence;
}

void Group::compare_calls() const {
  for (int peer = 0; peer < world_size_; ++peer) {
    const std::uint64_t theirs = load_acquire(&logged(peer, sequence_).hash);
    if (theirs == logged_ || (theirs & 0xffff) != (logged_ & 0xffff)) continue;  // equal, not begun, or a later one
    report_mismatch();
  }
}

std::string Group::named(int peer) const {
  static const std::string host = host_name();
  return concat("rank ", peer, " (process ", peers_[peer].pid, " on ", host, ')');
}

std::string Group::last_call_of(int peer) const {
  const std::uint64_t calls = load_acquire(&control(peer).calls.value);
  if (calls == 0) return "no call";
  const LoggedCall& last = logged(peer, calls - 1);
  const std::string place = place_of(last);
  return concat(name(static_cast<Op>(last.signature.op)), " #", calls - 1, in_brackets(place));
}

// Returns for instance "all_reduce #7: rank 0 (train.py:88)"; calls are numbered from 0.
std::string Group::call_here() const {
  record_site();
  const LoggedCall& entry = logged(rank_, sequence_);
  return concat(name(static_cast<Op>(entry.signature.op)), " #", sequence_, ": rank ", rank_,
                in_brackets(place_of(entry)));
}

bool Group::is_gone(int peer) const {
  if (peer == rank_ || !peers_[peer].segment) return false;
  return load_acquire(&control(peer).left.value) != 0 || is_exited(peer);
}

std::string Group::why_gone(int peer) const {
  return is_exited(peer) ? "its process has exited" : "it has closed its communicator, or its function has returned";
}

int Group::cause_of(int gone, bool in_call) const {
  int cause = gone;
  std::uint64_t first = ~std::uint64_t{0};
  for (int peer = 0; peer < world_size_; ++peer) {
    if (!is_gone(peer) || (in_call && !holds_up(peer))) continue;  // it has done its part of this call
    const std::uint64_t closed_at = load_acquire(&control(peer).left.value);
    if (closed_at == 0) return peer;
    if (closed_at >= first) continue;
    first = closed_at;
    cause = peer;
  }
  return cause;
}

std::string Group::held_up_by(int peer) const {
  std::string text;
  for (int hops = 0; hops < world_size_; ++hops) {
    if (is_stopped(peer)) return text + ", which is stopped by a signal";
    const std::uint64_t next = load_acquire(&control(peer).waiting.value);
    if (next == 0 || static_cast<int>(next - 1) == rank_) return text;
    peer = static_cast<int>(next - 1);
    text += concat(", which waits for ", named(peer));
  }
  return text;
}

bool Group::waits_in_circle(int peer) const {
  for (int hops = 0; hops < world_size_ && peer != rank_; ++hops) {
    const Control& theirs = control(peer);
    const std::uint64_t next = load_acquire(&theirs.waiting.value);
    if (next == 0 || load_acquire(&theirs.calls.value) != load_acquire(&theirs.ended.value)) return false;
    peer = static_cast<int>(next - 1);
  }
  return peer == rank_;
}

void Group::leave() const { claim(&control().left.value, 0, static_cast<std::uint64_t>(now_ns())); }

Deadline Group::deadline(const Call& call) const {
  return {&call, call.timeout_ms > 0 ? call.timeout_ms : timeout_ms.load(std::memory_order_relaxed)};
}

void Group::ring_bell(int peer) const {
  Control& c = control(peer);
  if (load_after_store(&c.bell_sleepers.value) == 0) return;
  fetch_add(&c.doorbell.value, 1);
  futex_wake(&c.doorbell.value);
}

// ---- the end -------------------------------------------------------------------------------------------------------

// Sets every rank's abort flag. The reason is written later, since it may name the places of the other ranks' calls,
// which waiting ranks look up once they see the flag.
void Group::set_abort_flags() const {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (!peers_[peer].segment && peer != rank_) continue;
    Control& c = peer == rank_ ? control() : control(peer);
    if (!claim(&c.abort.value, 0, 1)) continue;
    fetch_add(&c.doorbell.value, 1);
    futex_wake(&c.doorbell.value);
  }
}

// Writes the reason for all ranks to read: on rank 0's segment or, if rank 0's is not attached yet, on every attached
// segment.
void Group::write_reason(const std::string& reason, ErrorCode code) const {
  const std::string text = reason.substr(0, reason.rfind("; the communicator is aborted"));  // raise_end adds it
  const auto write = [&](AbortState& v) {
    v.code = static_cast<std::uint32_t>(code);
    copy_text(v.reason, sizeof v.reason, text.c_str());
    store_release(&v.state, kWritten);
  };
  write(abort_state());
  if (peers_[0].segment) return;
  for (int peer = 1; peer < world_size_; ++peer)
    if (peer != rank_ && peers_[peer].segment && claim(&control(peer).abort_state.state, 0, kWriters))
      write(control(peer).abort_state);
}

// Returns the reason; null while it is not written.
const AbortState* Group::written_reason() const {
  for (const AbortState* v : {&abort_state(), &control().abort_state})
    if (load_acquire(&v->state) == kWritten) return v;
  return nullptr;
}

void Group::abort(const std::string& reason, ErrorCode code) const {
  const bool first = claim_abort_state(0);
  set_abort_flags();
  if (first) write_reason(reason, code);
}

std::string Group::why_aborted() const {
  if (!aborted()) return {};
  for (int i = 0; i < 10000; ++i) {
    if (const AbortState* v = written_reason()) return v->reason;
    const std::uint64_t state = load_acquire(&abort_state().state);
    const int writer = static_cast<int>(state - kWriters);  // it writes next, unless it has been killed
    if (state >= kWriters && is_exited(writer) && claim_abort_state(state))  // a closed rank may still write
      write_reason(concat(named(writer), " gave up, and ", why_gone(writer), " before it said why"),
                   ErrorCode::kRankLost);
    usleep(100);
  }
  return "the reason was not told by the rank that gave up";
}

ErrorCode Group::aborted_as() const {
  const AbortState* v = written_reason();
  return v ? static_cast<ErrorCode>(v->code) : ErrorCode::kAborted;
}

void Group::check_abort(const Call& call) const {
  if (aborted()) raise_end(call.op);
}

void Group::raise_end(Op op) const {
  set_abort_flags();  // the rank that set this rank's flag may have died before it set the others
  const std::string why = why_aborted();
  const ErrorCode code = aborted_as();
  const bool fewer = code == ErrorCode::kRankLost || code == ErrorCode::kTimeout;
  if (code != ErrorCode::kAborted) fail(code, why, fewer ? kAdviceToShrink : kAdvice);
  fail(code, name(op), ": rank ", rank_, " expected an open communicator, got an abort: ", why, kAdvice);
}

void Group::fail_group(const Call& call, ErrorCode code, const std::string& message) const {
  abort(message, code);
  raise_end(call.op);
}

// Waits until no peer accesses this rank's buffers, which then belong to their caller again. Returns false if a peer
// was stopped by a signal during an access, which it may continue at any time.
bool Group::wait_peers_idle() const {
  for (int peer = 0; peer < world_size_; ++peer)
    while (peer != rank_ && load_after_store(&control(peer).in_place.value) && !is_exited(peer)) {
      if (is_stopped(peer)) return false;
      usleep(100);
    }
  return true;
}

// ---- calls that differ ---------------------------------------------------------------------------------------------

void Group::report_mismatch() const {
  record_site();
  const bool first = claim_abort_state(0);
  set_abort_flags();
  const LoggedCall& mine = logged(rank_, sequence_);
  if (first) {
    await_call_sites(sequence_);
    std::uint64_t sequence = sequence_;  // of the first differing call; only earlier calls can differ before this one
    const auto agree = [&](std::uint64_t number) {
      const std::vector<Caller> all = callers(number);
      return std::all_of(all.begin(), all.end(), [&](const Caller& c) { return c.signature == all[0].signature; });
    };
    while (sequence > 0 && sequence + kLoggedCalls > sequence_ + 1 && !agree(sequence - 1)) --sequence;
    std::string text = difference(callers(sequence));
    if (sequence != sequence_) text += concat(", found in ", name(static_cast<Op>(mine.signature.op)), " #", sequence_);
    write_reason(text + kSameCalls, ErrorCode::kMismatch);
  }
  raise_end(static_cast<Op>(mine.signature.op));
}

// Gives the ranks that are in the call some time to state their places: they notice the abort at their next poll.
void Group::await_call_sites(std::uint64_t sequence) const {
  const auto end = Clock::now() + std::chrono::milliseconds(300);
  for (int peer = 0; peer < world_size_; ++peer) {
    const LoggedCall& entry = logged(peer, sequence);
    while (load_acquire(&control(peer).calls.value) == sequence + 1 && !load_acquire(&entry.has_site) &&
           !is_gone(peer) && Clock::now() < end)
      usleep(500);
  }
}

// Returns each rank's call with this number, if the rank has begun it.
std::vector<Caller> Group::callers(std::uint64_t sequence) const {
  std::vector<Caller> result;
  for (int peer = 0; peer < world_size_; ++peer) {
    const LoggedCall& entry = logged(peer, sequence);
    if ((load_acquire(&entry.hash) & 0xffff) == ((sequence + 1) & 0xffff))
      result.push_back({peer, entry.signature, place_of(entry)});
  }
  return result;
}

}  // namespace ringcomm::cpu
