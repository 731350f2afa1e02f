// The wait-for graph across all communicators of this host. Two ranks that wait for each other in two communicators
// cause no error inside either of them; the graph shows the cycle.
//
// A *party* is a set of threads of one process that call the same communicators, usually one rank. Each process has one
// page of shared memory with a record for each of its parties, which any process of the job can map. A record is filled
// in only once *every* thread of the party has waited for kLongWaitMs, and only as long as all of them wait:
//
//   stamp            0: some thread of the party may continue; else a number that no other state of a record has
//   waits            the parties for which the threads of this party wait, and the calls in which they wait
//   asked, answered  questions "do you still wait?", and the last one that every waiting thread has answered with yes
//   reported         the stamp of the waits that were found to be a deadlock, and the sentences to report
//
// A rank that waits examines all records that it can reach from its own. If one of them is empty, its party may
// continue, and there is no deadlock. If none is empty, the rank asks all these parties a question, and examines the
// records again. If every stamp is unchanged and every question is answered, no thread in the cycle has made progress
// since before the questions, and none has found its wait to be over: so none of these waits will ever end. The rank
// tells all these parties, and each aborts the communicators in which it waits or is waited for, before it continues.
//
// False alarms are worse than late ones. So a party's record stays empty while one of its threads computes, waits for
// anything else, or waits with a time limit of its own; while asynchronous messages are in flight that no thread waits
// for; or while the process has Python threads that might still make a call.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/link.h"
#include "runtime/shared_memory.h"

namespace ringcomm::cpu {

// The time until a wait enters the graph: milliseconds, or RINGCOMM_DEADLOCK_MS; 0: never.
inline constexpr int kLongWaitMs = 1000;
inline constexpr int kSearchesPerWait = 4;            // number of searches per further kLongWaitMs
inline constexpr std::int64_t kLeastLimitMs = 10000;  // shorter waits end by themselves, outside of the graph
// Ends the error of sends that wait for each other.
inline constexpr const char* kAdviceToSenders =
    "; a long send waits for its receive: use sendrecv, or isend, or make the calls inside coalesce()";
inline constexpr int kMostParties = 128, kMostWaits = 4;

inline thread_local std::uint64_t this_caller = 0;  // a number of this thread; 0: it has made no call yet

// The location of a party's record.
struct PartyPlace {
  std::uint64_t party = 0;  // generation << 16 | index + 1; 0: unknown
  std::uint64_t nonce = 0;  // of the page
  std::int32_t pid = 0, fd = -1;
};

enum class WaitKind : std::uint8_t {
  kCollective,
  kSend,
  kReceive,
  kItem,  // for a call of this rank that another thread executes
  kProbe,
};

inline bool waits_for_send(WaitKind kind) { return kind == WaitKind::kReceive || kind == WaitKind::kProbe; }

// A thread's wait, as stored in its party's record.
struct WaitFacts {
  std::uint64_t group = 0;  // communicator
  std::int32_t rank = 0, peer = 0;
  PartyPlace target;  // the party of the peer
  WaitKind kind = WaitKind::kItem;
  char call[120] = {};  // "all_gather #7 (train.py:77)"
  char here[240] = {};  // "all_gather #7: rank 0 (train.py:77) expected rank 1 (process 43 on node7) in this call"
};

class WaitGraph {
 public:
  // The activity of a communicator's own threads on this rank.
  struct Activity {
    bool known = false;        // false: its threads may be doing anything
    bool executes = false;     // whether a collective is executing
    std::size_t queued = 0;    // number of queued collectives
    std::size_t messages = 0;  // number of messages that have not ended
  };

  // One rank of one communicator in this process.
  struct Member {
    Flag* party = nullptr;  // read by the peers; as in PartyPlace
    std::function<Activity()> activity;
    std::function<void(const std::string&)> abort;  // aborts the communicator with a sentence
    std::atomic<std::uint64_t> last_caller{0};
    std::uint64_t group = 0;
    int index = -1;  // of its party
  };

  // One long wait.
  struct Entry {
    Member* member;
    std::uint64_t thread, number;
    const void* what;  // identifies the message
    WaitFacts facts;
    std::uint64_t confirmed = 0;  // the last question that this wait has confirmed
    std::uint64_t alone = 0;      // the last question at which no thread outside of all parties was found
  };

  // The state of one party, as seen in a search.
  struct PartyState {
    PartyPlace place;
    std::uint64_t stamp = 0, question = 0;
    std::vector<WaitFacts> waits;
    std::vector<std::size_t> targets;  // of the waits, as indices into all parties seen
  };

  // Returns the graph of this process, which lives as long as it is used.
  static std::shared_ptr<WaitGraph> of_this_process();

  WaitGraph();
  ~WaitGraph();
  std::chrono::milliseconds long_wait() const { return long_wait_; }
  PartyPlace place() const { return {0, nonce_, pid_, memory_.fd()}; }

  // Adds a communicator that the calling thread connects: from now on thread and communicator belong to one party.
  // Other threads of a process with one rank may take over its calls, so they join the same party; where ranks are
  // threads, each is a party of its own.
  void add(Member& member, std::uint64_t group, bool ranks_are_threads);
  void remove(Member& member);
  // Called before every call: notes which threads use a communicator.
  void note_caller(Member& member) {
    if (member.last_caller.load(std::memory_order_relaxed) != this_caller || this_caller == 0) note_new_caller(member);
  }

  Entry* begin(Member& member, const void* what, const WaitFacts& facts);
  void end(Entry* entry);
  // Aborts the communicators of a deadlock that another rank has reported. Call it before checking for a lost rank.
  void abort_if_reported(Entry* entry);
  // Searches for a deadlock once, and aborts its communicators. `has_come` returns whether the wait is over, `target`
  // is the present location of the peer's record; `seen` is the result of the last search.
  void search(Entry* entry, const PartyPlace& target, const std::function<bool()>& has_come,
              std::vector<PartyState>& seen);
  static void thread_ended(std::uint64_t thread);

 private:
  struct Record;
  struct Page;
  struct Thread {
    int index;            // of its party
    std::uint64_t ident;  // of its pthread
  };

  void note_new_caller(Member& member);
  int new_party();
  int party_for_caller(bool ranks_are_threads);
  void join(Member& member, int index);
  void merge(int kept, int dropped);
  void drop_party(int index);
  bool is_stuck(int index) const;
  void hide(int index);
  void publish(int index);
  void answer(int index);
  bool has_no_other_callers(int index) const;
  void abort_if_reported(int index);
  Record* record_at(const PartyPlace& place);
  bool read(const PartyPlace& place, PartyState& seen);
  std::vector<PartyState> reachable_from(const PartyPlace& start);
  bool all_answered(const std::vector<PartyState>& seen);
  void report(const std::vector<PartyState>& seen);

  SharedMemory memory_;
  Page& page_;
  const std::uint64_t nonce_;
  const std::int32_t pid_;
  const std::chrono::milliseconds long_wait_;
  mutable std::mutex mutex_;  // guards everything below, and this process's page
  std::list<Member*> members_;
  std::map<std::uint64_t, Thread> threads_;
  std::list<Entry> entries_;
  std::map<int, std::vector<std::uint64_t>> published_;           // by party: the entries in its record
  std::map<std::uint64_t, std::unique_ptr<SharedMemory>> pages_;  // of other processes, by nonce
  std::uint64_t generations_ = 0, stamps_ = 0, numbers_ = 0;
};

}  // namespace ringcomm::cpu
