#include "cpu/group/wait_graph.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "core/scope_exit.h"
#include "runtime/forks.h"
#include "runtime/identity.h"
#include "runtime/interrupt.h"

namespace ringcomm::cpu {

namespace {

constexpr std::uint64_t kPageMagic = 0x72696e6777616974;  // "ringwait"
constexpr std::size_t kMostSeen = 1024;                   // most parties in one search
constexpr std::size_t kMostPages = 512;
constexpr int kMostHops = 4;  // most waits in one sentence
constexpr int kMostGroups = 2 * kMostWaits;

int index_of(std::uint64_t party) { return static_cast<int>(party & 0xffff) - 1; }

int long_wait_asked_for() {
  const char* const text = std::getenv("RINGCOMM_DEADLOCK_MS");
  if (!text || !*text) return kLongWaitMs;
  char* end = nullptr;
  const unsigned long asked = std::strtoul(text, &end, 10);
  if (*end || *text < '0' || *text > '9' || asked > 1000000000)
    fail(ErrorCode::kInvalid, "Engine: expected milliseconds from 0 to 1000000000 in RINGCOMM_DEADLOCK_MS, got \"",
         text, "\"; leave it out for ", kLongWaitMs);
  return static_cast<int>(asked);
}

// The graph of a process; a forked child makes its own.
struct Instance {
  const int forks = forks_so_far();
  std::mutex mutex;
  std::weak_ptr<WaitGraph> graph;

  static Instance& current() {
    static std::atomic<Instance*> known{new Instance};
    Instance* now = known.load();
    while (now->forks != forks_so_far()) {
      auto fresh = std::make_unique<Instance>();  // a thread of the parent may hold the old one's lock
      if (known.compare_exchange_strong(now, fresh.get())) now = fresh.release();
    }
    return *now;
  }
};

bool same(const PartyPlace& a, const PartyPlace& b) { return a.party == b.party && a.nonce == b.nonce; }

// Whether two waits are the two ends of a message, which may be moving.
bool are_two_ends(const WaitFacts& a, const WaitFacts& b) {
  const bool ends =
      (a.kind == WaitKind::kSend && waits_for_send(b.kind)) || (waits_for_send(a.kind) && b.kind == WaitKind::kSend);
  return ends && a.group == b.group && a.rank == b.peer && a.peer == b.rank;
}

}  // namespace

struct WaitGraph::Record {
  alignas(kLineBytes) Flag party;  // as in PartyPlace; 0: the record is free
  Flag stamp, answered;
  alignas(kLineBytes) Flag asked;
  Flag reported;  // stamp << 1; the lowest bit is set while the sentences are being written
  std::uint32_t num_waits;
  WaitFacts waits[kMostWaits];
  struct {
    std::uint64_t group;  // a group in which the party waits or is waited for; 0: none
    char sentence[1000];
  } ends[kMostGroups];
};

struct WaitGraph::Page {
  std::uint64_t magic, nonce;
  Record records[kMostParties];
};

// ---- threads and communicators -------------------------------------------------------------------------------------

std::shared_ptr<WaitGraph> WaitGraph::of_this_process() {
  Instance& instance = Instance::current();
  const std::lock_guard<std::mutex> lock(instance.mutex);
  std::shared_ptr<WaitGraph> graph = instance.graph.lock();
  if (!graph) instance.graph = graph = std::make_shared<WaitGraph>();
  return graph;
}

WaitGraph::WaitGraph()
    : memory_(SharedMemory::create("ringcomm-waits", sizeof(Page))),
      page_(*reinterpret_cast<Page*>(memory_.data())),
      nonce_(random_number()),
      pid_(getpid()),
      long_wait_(long_wait_asked_for()) {
  static_assert(std::is_trivially_copyable_v<Page>, "it begins as zeros");
  page_.nonce = nonce_;
  page_.magic = kPageMagic;
}

WaitGraph::~WaitGraph() = default;

// -1: there are too many parties; this one is not in the graph.
int WaitGraph::new_party() {
  for (int i = 0; i < kMostParties; ++i) {
    Record& record = page_.records[i];
    if (load_relaxed(&record.party) != 0) continue;
    store_release(&record.party, ++generations_ << 16 | static_cast<std::uint64_t>(i + 1));
    return i;
  }
  return -1;
}

void WaitGraph::join(Member& member, int index) {
  member.index = index;
  store_release(member.party, index < 0 ? 0 : load_relaxed(&page_.records[index].party));
}

void WaitGraph::merge(int kept, int dropped) {
  hide(kept);
  hide(dropped);
  for (Entry& entry : entries_)
    if (entry.member->index == dropped || entry.member->index == kept) entry.confirmed = entry.alone = 0;
  for (Member* member : members_)
    if (member->index == dropped) join(*member, kept);
  for (auto& [id, thread] : threads_)
    if (thread.index == dropped) thread.index = kept;
  drop_party(dropped);
}

void WaitGraph::drop_party(int index) {
  hide(index);
  published_.erase(index);
  store_release(&page_.records[index].party, 0);
}

int WaitGraph::party_for_caller(bool ranks_are_threads) {
  const auto known = threads_.find(this_caller);
  if (known != threads_.end()) return known->second.index;
  if (ranks_are_threads) return new_party();
  std::set<int> parties;
  for (const Member* other : members_) parties.insert(other->index);
  return parties.size() == 1 ? *parties.begin() : new_party();
}

void WaitGraph::add(Member& member, std::uint64_t group, bool ranks_are_threads) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    member.group = group;
    join(member, party_for_caller(ranks_are_threads));
    members_.push_back(&member);
  }
  note_new_caller(member);
}

void WaitGraph::note_new_caller(Member& member) {
  static std::atomic<std::uint64_t> callers{0};
  if (this_caller == 0) {
    this_caller = callers.fetch_add(1) + 1;
    thread_local const ScopeExit leaving([] { WaitGraph::thread_ended(this_caller); });
    (void)leaving;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (member.index < 0) return;
  const auto [thread, is_new] =
      threads_.insert({this_caller, {member.index, static_cast<std::uint64_t>(pthread_self())}});
  if (!is_new && thread->second.index != member.index) merge(thread->second.index, member.index);
  hide(member.index);
  member.last_caller.store(this_caller, std::memory_order_relaxed);
}

void WaitGraph::remove(Member& member) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find(members_.begin(), members_.end(), &member);
  if (found == members_.end()) return;
  members_.erase(found);
  const int index = std::exchange(member.index, -1);
  if (index < 0) return;
  hide(index);
  for (const Member* other : members_)
    if (other->index == index) return;
  for (auto it = threads_.begin(); it != threads_.end();)
    it = it->second.index == index ? threads_.erase(it) : std::next(it);
  drop_party(index);
}

void WaitGraph::thread_ended(std::uint64_t thread) {
  Instance& instance = Instance::current();
  std::shared_ptr<WaitGraph> graph;
  {
    const std::lock_guard<std::mutex> lock(instance.mutex);
    graph = instance.graph.lock();
  }
  if (!graph) return;
  const std::lock_guard<std::mutex> lock(graph->mutex_);
  const auto found = graph->threads_.find(thread);
  if (found == graph->threads_.end()) return;
  graph->hide(found->second.index);
  graph->threads_.erase(found);
}

// ---- this process's records ----------------------------------------------------------------------------------------

// Whether no thread of the party can go on before one of its waits ends.
bool WaitGraph::is_stuck(int index) const {
  const auto count = [&](const auto& counts) { return std::count_if(entries_.begin(), entries_.end(), counts); };
  const auto edges = count([&](const Entry& e) { return e.member->index == index && e.facts.kind != WaitKind::kItem; });
  if (edges < 1 || edges > kMostWaits) return false;
  for (const auto& [id, thread] : threads_)  // a thread with a wait inside another wait runs a signal handler there
    if (thread.index == index && count([&id = id](const Entry& e) { return e.thread == id; }) != 1) return false;
  for (const Member* member : members_) {
    if (member->index != index) continue;
    const Activity activity = member->activity ? member->activity() : Activity{};
    if (!activity.known) return false;
    const auto executed =
        count([&](const Entry& e) { return e.member == member && e.facts.kind == WaitKind::kCollective; });
    if (activity.executes ? executed != 1 : executed != 0 || activity.queued != 0) return false;
    std::set<const void*> messages;
    for (const Entry& e : entries_)
      if (e.member == member && (e.facts.kind == WaitKind::kSend || waits_for_send(e.facts.kind)))
        messages.insert(e.what);
    if (activity.messages != messages.size()) return false;
  }
  return true;
}

void WaitGraph::hide(int index) {
  if (index < 0) return;
  published_[index].clear();
  store_then_look(&page_.records[index].stamp, 0);
}

void WaitGraph::publish(int index) {
  if (index < 0) return;
  if (!is_stuck(index)) return hide(index);
  std::vector<std::uint64_t> now;
  for (const Entry& e : entries_)
    if (e.member->index == index) now.push_back(e.number);
  std::vector<std::uint64_t>& shown = published_[index];
  if (shown == now) return answer(index);
  hide(index);
  Record& record = page_.records[index];
  record.num_waits = 0;
  for (const Entry& e : entries_)
    if (e.member->index == index && e.facts.kind != WaitKind::kItem) record.waits[record.num_waits++] = e.facts;
  shown = std::move(now);
  answer(index);
  store_release(&record.stamp, ++stamps_);
}

// Records the last question that every waiting thread has confirmed, and that one of them has confirmed for all other
// threads of the process.
void WaitGraph::answer(int index) {
  std::uint64_t by_all = ~std::uint64_t{0}, alone = 0;
  for (const Entry& e : entries_) {
    if (e.member->index != index) continue;
    by_all = std::min(by_all, e.confirmed);
    alone = std::max(alone, e.alone);
  }
  Record& record = page_.records[index];
  const std::uint64_t answered = std::min(by_all, alone);
  if (answered > load_relaxed(&record.answered)) store_release(&record.answered, answered);
}

WaitGraph::Entry* WaitGraph::begin(Member& member, const void* what, const WaitFacts& facts) {
  const std::lock_guard<std::mutex> lock(mutex_);
  entries_.push_back({&member, this_caller, ++numbers_, what, facts});
  hide(member.index);
  return &entries_.back();
}

void WaitGraph::end(Entry* entry) {
  const std::lock_guard<std::mutex> lock(mutex_);
  abort_if_reported(entry->member->index);
  hide(entry->member->index);
  entries_.remove_if([&](const Entry& each) { return &each == entry; });
}

// Whether the process has only threads that make no more calls for this party, apart from its own, which all wait.
// Calls the user's language, so the lock is not held.
bool WaitGraph::has_no_other_callers(int index) const {
  std::vector<std::uint64_t> idents;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (threads_.find(this_caller) == threads_.end()) return false;  // a thread of an engine
    std::set<std::uint64_t> groups;
    for (const Member* member : members_)
      if (member->index == index) groups.insert(member->group);
    std::set<int> peers;  // parties that are other ranks of the same communicators make no calls for this one
    for (const Member* member : members_)
      if (groups.count(member->group)) peers.insert(member->index);
    for (const auto& [id, thread] : threads_)
      if (peers.count(thread.index)) idents.push_back(thread.ident);
  }
  return has_only_threads(idents);
}

// Reports the deadlock to the peers before they can see that this rank has left.
void WaitGraph::abort_if_reported(int index) {
  if (index < 0) return;
  const Record& record = page_.records[index];
  const std::uint64_t stamp = load_relaxed(&record.stamp);
  if (stamp == 0 || load_acquire(&record.reported) != stamp << 1) return;
  for (const auto& end : record.ends)
    for (const Member* member : members_)
      if (end.group != 0 && member->index == index && member->group == end.group) member->abort(end.sentence);
}

void WaitGraph::abort_if_reported(Entry* entry) {
  const std::lock_guard<std::mutex> lock(mutex_);
  abort_if_reported(entry->member->index);
}

// ---- the search -----------------------------------------------------------------------------------------------------

// Null: the process has exited, or its page cannot be opened.
WaitGraph::Record* WaitGraph::record_at(const PartyPlace& place) {
  const int index = index_of(place.party);
  if (index < 0 || index >= kMostParties) return nullptr;
  if (place.nonce == nonce_) return &page_.records[index];
  const auto known = pages_.find(place.nonce);
  if (known != pages_.end()) return &reinterpret_cast<Page*>(known->second->data())->records[index];
  if (pages_.size() >= kMostPages) return nullptr;
  try {
    auto memory = std::make_unique<SharedMemory>(SharedMemory::open(place.pid, place.fd, sizeof(Page)));
    auto* const page = reinterpret_cast<Page*>(memory->data());
    if (page->magic != kPageMagic || page->nonce != place.nonce) return nullptr;
    pages_[place.nonce] = std::move(memory);
    return &page->records[index];
  } catch (const Error&) {
    return nullptr;
  }
}

// False: the party may go on.
bool WaitGraph::read(const PartyPlace& place, PartyState& seen) {
  Record* const record = record_at(place);
  if (!record) return false;
  seen = {place, load_acquire(&record->stamp), 0, {}, {}};
  if (seen.stamp == 0 || load_relaxed(&record->party) != place.party) return false;
  WaitFacts waits[kMostWaits];
  std::memcpy(waits, record->waits, sizeof waits);
  const std::uint32_t num_waits = record->num_waits;
  if (fetch_add(&record->stamp, 0) != seen.stamp || num_waits < 1 || num_waits > kMostWaits) return false;
  seen.waits.assign(waits, waits + num_waits);
  return true;
}

// Returns all parties that this party waits for, directly or through others; empty if one of them may go on.
std::vector<WaitGraph::PartyState> WaitGraph::reachable_from(const PartyPlace& start) {
  std::vector<PartyState> all(1);
  if (!read(start, all[0])) return {};
  const auto found = [&](const PartyPlace& place) {
    return std::find_if(all.begin(), all.end(), [&](const PartyState& each) { return same(each.place, place); });
  };
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t k = 0; k < all[i].waits.size(); ++k) {
      const WaitFacts wait = all[i].waits[k];
      if (wait.target.party == 0 || all.size() > kMostSeen) return {};
      auto target = found(wait.target);
      if (target == all.end()) {
        PartyState next;
        if (!read(wait.target, next)) return {};
        all.push_back(std::move(next));
        target = std::prev(all.end());
      }
      for (const WaitFacts& theirs : target->waits)
        if (are_two_ends(wait, theirs)) return {};
      all[i].targets.push_back(static_cast<std::size_t>(target - all.begin()));
    }
  return all;
}

bool WaitGraph::all_answered(const std::vector<PartyState>& seen) {
  return std::all_of(seen.begin(), seen.end(), [&](const PartyState& each) {
    const Record* const record = record_at(each.place);
    return record && load_acquire(&record->answered) >= each.question;
  });
}

namespace {

// The number of waits from each party to the goal; more than kMostHops where none lead there.
std::vector<int> distances_to(const std::vector<WaitGraph::PartyState>& seen, std::size_t goal) {
  std::vector<int> hops(seen.size(), kMostHops + 1);
  hops[goal] = 0;
  for (int round = 0; round < kMostHops; ++round)
    for (std::size_t i = 0; i < seen.size(); ++i)
      for (const std::size_t target : seen[i].targets) hops[i] = std::min(hops[i], hops[target] + 1);
  return hops;
}

// Returns for instance "all_gather #7: rank 0 (train.py:77) expected rank 1 (process 43 on node7) in this call, but it
// waits in barrier #3 (train.py:91) of another communicator for rank 0; call ...". It starts with wait k of
// `seen[from]`, and ends at the first party that is `seen[from]` or was named before.
std::string sentence_of(const std::vector<WaitGraph::PartyState>& seen, std::size_t from, std::size_t k) {
  const std::vector<int> hops = distances_to(seen, from);
  const WaitFacts& wait = seen[from].waits[k];
  std::string text = concat(wait.here, ", ");
  std::vector<bool> named(seen.size(), false);
  std::size_t at = seen[from].targets[k];
  bool sends = wait.kind == WaitKind::kSend;  // all of them wait for a receive
  for (int hop = 0; hop < kMostHops && !named[at] && (hop == 0 || at != from); ++hop) {
    named[at] = true;
    const auto& targets = seen[at].targets;
    const auto nearest = std::min_element(targets.begin(), targets.end(),
                                          [&](std::size_t a, std::size_t b) { return hops[a] < hops[b]; });
    const WaitFacts& next = seen[at].waits[static_cast<std::size_t>(nearest - targets.begin())];
    sends = sends && next.kind == WaitKind::kSend;
    const bool here = next.group == wait.group, back = *nearest == from;
    text += concat(hop ? ", which waits in " : "but it waits in ", next.call, here ? "" : " of another communicator",
                   " for rank ", next.peer);
    if (!back && !here) text += concat(" there (process ", next.target.pid, ')');
    if (back && next.peer != wait.rank) text += " there, which is this rank";
    at = *nearest;
  }
  return text +
         (sends ? kAdviceToSenders : "; call the collectives of all communicators in the same order on every rank");
}

}  // namespace

// Writes the sentences to all records; a record that has some already got the same ones from another rank.
void WaitGraph::report(const std::vector<PartyState>& seen) {
  std::vector<std::pair<Record*, std::uint64_t>> newly;
  for (std::size_t i = 0; i < seen.size(); ++i) {
    Record* const record = record_at(seen[i].place);
    if (!record) continue;
    const std::uint64_t reported = load_acquire(&record->reported);
    if (reported >> 1 == seen[i].stamp || !claim(&record->reported, reported, seen[i].stamp << 1 | 1)) continue;
    int ends = 0;
    const auto add = [&](std::size_t from, std::size_t k) {
      const std::uint64_t group = seen[from].waits[k].group;
      const auto is_there = [&](const auto& end) { return end.group == group; };
      if (ends == kMostGroups || std::any_of(record->ends, record->ends + ends, is_there)) return;
      auto& end = record->ends[ends++];
      end.group = group;
      std::strncpy(end.sentence, sentence_of(seen, from, k).c_str(), sizeof end.sentence - 1);
    };
    std::for_each(record->ends, record->ends + kMostGroups, [](auto& end) { end.group = 0; });
    for (std::size_t k = 0; k < seen[i].waits.size(); ++k) add(i, k);
    for (std::size_t from = 0; from < seen.size(); ++from)
      for (std::size_t k = 0; k < seen[from].waits.size(); ++k)
        if (seen[from].targets[k] == i) add(from, k);
    newly.emplace_back(record, seen[i].stamp << 1);
  }
  for (const auto& [record, stamp] : newly) store_release(&record->reported, stamp);  // no rank leaves before all know
}

void WaitGraph::search(Entry* entry, const PartyPlace& target, const std::function<bool()>& has_come,
                       std::vector<PartyState>& seen) {
  PartyPlace start = place();
  std::uint64_t question = 0, answered = 0;
  int index = -1;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    index = entry->member->index;
    if (index < 0) return;
    const Record& record = page_.records[index];
    start.party = load_relaxed(&record.party);
    question = load_acquire(&record.asked);
    answered = entry->alone;
  }
  const bool alone = question > answered && has_no_other_callers(index);
  const std::lock_guard<std::mutex> lock(mutex_);
  index = entry->member->index;
  if (index < 0 || load_relaxed(&page_.records[index].party) != start.party || has_come()) return;
  entry->confirmed = question;
  if (alone) entry->alone = question;
  if (!same(entry->facts.target, target)) {
    entry->facts.target = target;
    hide(index);
  }
  publish(index);
  if (entry->facts.kind == WaitKind::kItem) return;
  std::vector<PartyState> now = reachable_from(start);
  const auto alike = [](const PartyState& a, const PartyState& b) {
    return same(a.place, b.place) && a.stamp == b.stamp;
  };
  if (!now.empty() && std::equal(now.begin(), now.end(), seen.begin(), seen.end(), alike)) {
    if (all_answered(seen)) report(seen);
    return abort_if_reported(index);
  }
  seen = std::move(now);
  for (PartyState& each : seen)
    if (Record* const record = record_at(each.place)) each.question = fetch_add(&record->asked, 1) + 1;
}

}  // namespace ringcomm::cpu
