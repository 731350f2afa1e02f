// Who waits for whom, across all communicators of this host. Two ranks that wait for each other in two communicators
// find no error inside either of them; the wait-for graph shows the circle.
//
// A *party* is a set of threads of one process that call the same communicators: as a rule, a rank. Each process has
// one page of shared memory with a record for each of its parties, which any process of the job can map. A record is
// filled in only once *every* thread of the party has waited for kLongWaitMs, and only as long as all of them wait:
//
//   stamp            0: some thread of the party may go on; else a number that no other state of a record has
//   waits            for which parties the threads of this one wait, and in which calls
//   asked, answered  questions "do you still wait?", and the last one that every waiting thread has answered with yes
//   told             the stamp of the waits that were found to be a deadlock, and what to say about them
//
// A rank that waits looks at all records that it can reach from its own. If one of them is empty, that party may go on,
// and nothing is said. If none is, it asks all of them, and looks again. Where every stamp is still the same and every
// question has its answer, no thread in the circle can have done anything since before the questions, and none found
// that what it waits for had come: so nobody ever will. All of them are told, and each aborts the communicators in
// which it waits or is waited for, before it goes on.
//
// False alarms are worse than late ones. So a party says nothing while one of its threads computes, waits for
// anything else, or waits with a limit of its own; while asynchronous messages are in flight that nobody waits for; or
// while the process has Python threads that might yet make a call.
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
#include "core/shm.h"

namespace ringcomm::cpu {

// Until a wait is told to the others: milliseconds, or RINGCOMM_DEADLOCK_MS; 0: never.
inline constexpr int kLongWaitMs = 1000;
inline constexpr int kLooks = 4;                      // at the others, in as long again
inline constexpr std::int64_t kLeastLimitMs = 10000;  // of a wait that is told: a shorter one ends by itself
inline constexpr int kMostParties = 128, kMostWaits = 4;

inline thread_local std::uint64_t this_caller = 0;  // a number of this thread; 0: it has made no call yet

// Where the record of a party lies.
struct PartyPlace {
  std::uint64_t party = 0;  // generation << 16 | index + 1; 0: unknown
  std::uint64_t nonce = 0;  // of the page
  std::int32_t pid = 0, fd = -1;
};

enum class WaitKind : std::uint8_t {
  kCollective,
  kSend,
  kReceive,
  kItem,  // for a call of the own communicator that another thread executes
};

// A thread's wait, as its record tells it.
struct WaitFacts {
  std::uint64_t group = 0;  // communicator
  std::int32_t rank = 0, peer = 0;
  PartyPlace target;  // the party of that peer
  WaitKind kind = WaitKind::kItem;
  char call[120] = {};  // "all_gather #7 (train.py:77)"
  char here[240] = {};  // "all_gather #7: rank 0 (train.py:77) expected rank 1 (process 43 on node7) in this call"
};

class WaitGraph {
 public:
  // What a communicator's own threads do on this rank.
  struct Activity {
    bool known = false;        // else it may do anything
    bool executes = false;     // a collective
    std::size_t queued = 0;    // collectives
    std::size_t messages = 0;  // that have not ended
  };

  // One rank of one communicator in this process.
  struct Member {
    Flag* party = nullptr;  // for the peers: as in PartyPlace
    std::function<Activity()> activity;
    std::function<void(const std::string&)> abort;  // ends the communicator with a sentence
    std::atomic<std::uint64_t> last_caller{0};
    std::uint64_t group = 0;
    int index = -1;  // of its party
  };

  // One wait that has lasted.
  struct Entry {
    Member* member;
    std::uint64_t thread, number;
    const void* what;  // tells messages apart
    WaitFacts facts;
    std::uint64_t confirmed = 0;  // the last question that it has answered
    std::uint64_t alone = 0;      // the last one that found no thread outside of all parties
  };

  // What a look has seen of one party.
  struct Seen {
    PartyPlace place;
    std::uint64_t stamp = 0, question = 0;
    std::vector<WaitFacts> waits;
    std::vector<std::size_t> targets;  // of the waits, among all that were seen
  };

  // That of this process, for as long as somebody uses it.
  static std::shared_ptr<WaitGraph> of_this_process();

  WaitGraph();
  ~WaitGraph();
  std::chrono::milliseconds long_wait() const { return long_wait_; }
  PartyPlace place() const { return {0, nonce_, pid_, memory_.fd()}; }

  // The caller's thread connects a communicator: the two belong together from here on.
  // Other threads of a process that has one rank may take over its calls, so they are one party; where ranks are
  // threads, each is its own.
  void add(Member& member, std::uint64_t group);
  void remove(Member& member);
  // Before every call: which threads use a communicator.
  void note_caller(Member& member) {
    if (member.last_caller.load(std::memory_order_relaxed) != this_caller || this_caller == 0) note_new_caller(member);
  }

  Entry* begin(Member& member, const void* what, const WaitFacts& facts);
  void end(Entry* entry);
  // Ends the communicators of a deadlock that another rank has found. Look at it before a lost rank is blamed.
  void hear(Entry* entry);
  // Looks for a deadlock once, and ends the communicators of one. `has_come` says whether the wait is over, `target`
  // where its peer's record lies now; `seen`: of the last look.
  void look(Entry* entry, const PartyPlace& target, const std::function<bool()>& has_come, std::vector<Seen>& seen);
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
  int party_for(const Member& member);
  void join(Member& member, int index);
  void merge(int kept, int dropped);
  void drop_party(int index);
  bool is_stuck(int index) const;
  void hide(int index);
  void publish(int index);
  void answer(int index);
  bool nobody_else() const;
  void obey(int index);
  Record* find(const PartyPlace& place);
  bool read(const PartyPlace& place, Seen& seen);
  std::vector<Seen> reach(const PartyPlace& start);
  bool all_answered(const std::vector<Seen>& seen);
  void tell(const std::vector<Seen>& seen);

  SharedMemory memory_;
  Page& page_;
  const std::uint64_t nonce_;
  const std::int32_t pid_;
  const std::chrono::milliseconds long_wait_;
  mutable std::mutex mutex_;  // of all that follows, and of this process's page
  std::list<Member*> members_;
  std::map<std::uint64_t, Thread> threads_;
  std::list<Entry> entries_;
  std::map<int, std::vector<std::uint64_t>> published_;           // by party: the entries that its record shows
  std::map<std::uint64_t, std::unique_ptr<SharedMemory>> pages_;  // of other processes, by nonce
  std::uint64_t generations_ = 0, stamps_ = 0, numbers_ = 0;
};

}  // namespace ringcomm::cpu
