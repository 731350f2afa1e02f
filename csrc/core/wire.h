// What carries bytes between hosts: a wire. The engine over hosts says which messages go when (hosts/), a wire moves
// them: send and receive of another library, which has every rank of the communicator (bind/c10d_wire, nccl/).
//
// On the host a walk's functions block until what they ask for is done. A device's wire enqueues it on `stream`, in
// order, and returns; what goes wrong later it tells the failure handler.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/engine.h"

namespace ringcomm {

// A limit of one call, as a point in time.
using WireClock = std::chrono::steady_clock;

struct Message {
  int peer;  // rank of the communicator
  void* data;
  std::size_t nbytes;
};

// Messages that are under way together.
struct Round {
  std::vector<Message> sends, recvs;
};

// Thrown by a wire; the engine makes a sentence of it.
struct __attribute__((visibility("default"))) WireFailure {
  int peer;          // rank that did not answer; -1: nobody in particular
  bool late;         // the limit has passed
  std::string what;  // what the library says
  // Where terms differ: this rank's and the peer's, as swapped.
  std::string mine = {}, theirs = {};
};

// The rounds of one walk, in order: start(0), finish(0), start(1), ...
class WireWalk {
 public:
  virtual ~WireWalk() = default;
  virtual void start(int round) = 0;
  // Behind this, what was received can be read and what was sent overwritten.
  virtual void finish(int round) = 0;
};

// What two ranks must agree on before a message of a call may go between them.
struct Terms {
  int peer;
  // Opaque bytes, and at most inline_bytes() of a message behind them.
  std::string mine;
};

class Wire {
 public:
  virtual ~Wire() = default;
  virtual const char* kind() const = 0;  // such as "gloo" or "nccl"

  // What a message may have behind its terms; 0 for wires that do not return the peers'.
  virtual std::size_t inline_bytes() const { return 0; }
  // Swaps terms with each peer and returns theirs, in the order given. A device's wire may return before it has them:
  // then the result is empty, and a difference goes to the failure handler.
  virtual std::vector<std::string> swap(const std::vector<Terms>& terms, WireClock::time_point limit,
                                        std::uintptr_t stream) = 0;

  // A walk whose messages match those of the walks that its peers open in the same `slot`, in the order of opening.
  // Walks in different slots may be under way at once; every rank starts the rounds of those that it shares with
  // another rank in the same order. Receives may begin as soon as the walk is open.
  virtual std::unique_ptr<WireWalk> open(int slot, std::vector<Round> rounds, WireClock::time_point limit,
                                         std::uintptr_t stream) = 0;

  // A message of the user's: Op::kSend or Op::kRecv, with a peer on another host. Messages of a pair stay in order per
  // tag. Throws kUnsupported for what the library cannot do.
  virtual std::shared_ptr<Request> message(const Call& call, std::int64_t limit_ms) = 0;

  // What waits of the host for a message ask now and then, with the name of the call: true: a signal ends the call, and
  // abort() was called for it.
  virtual void on_wait([[maybe_unused]] std::function<bool(const char*)> interrupted) {}

  // Memory that messages may lie in.
  virtual void* allocate(std::size_t nbytes) = 0;
  virtual void release(void* data) = 0;

  // Devices: the stream on which an asynchronous call runs behind what is on `stream` now, and what tells its end.
  virtual std::uintptr_t fork(std::uintptr_t stream) { return stream; }
  virtual std::shared_ptr<Request> join([[maybe_unused]] const Call& call, [[maybe_unused]] std::uintptr_t stream) {
    return nullptr;
  }
  // Devices: `stream` goes on behind the last call that used this wire; and the end of such a call on it.
  virtual void enter([[maybe_unused]] std::uintptr_t stream) {}
  virtual void leave([[maybe_unused]] std::uintptr_t stream, [[maybe_unused]] const Call& call,
                     [[maybe_unused]] std::int64_t limit_ms) {}

  // Ends every wait on this rank; later ones fail at once. From any thread, idempotent.
  virtual void abort() = 0;
  // Called once, from any thread, with what went wrong where no call was there to throw it.
  virtual void on_failure([[maybe_unused]] std::function<void(const WireFailure&)> handler) {}
  // Local. Sends that were started are finished.
  virtual void close() = 0;
  // Whether the caller is a thread of this wire, running a callback: such a one must not destroy it.
  virtual bool runs_this_thread() const { return false; }
  // Payload that this rank has sent, in bytes.
  virtual std::uint64_t sent_bytes() const = 0;
  virtual std::vector<std::pair<std::string, std::string>> describe() const { return {}; }
};

// ---- NCCL, loaded at run time --------------------------------------------------------------------------------------

// Ids that a wire needs: of the rounds, of messages from lower to higher ranks, of messages from higher to lower ones.
inline constexpr std::size_t kNcclIds = 3;

struct NcclOptions {
  std::string path;  // of libnccl.so.2; empty: one that is loaded already, else what the loader finds
  int rank = 0, world_size = 1;
  std::vector<std::string> unique_ids;  // kNcclIds of them, the same on all ranks
  int device = 0;
  std::int64_t timeout_ms = 30 * 60 * 1000;  // for all ranks to come
};

// A collective call of all ranks. Throws kUnsupported without a usable NCCL, kTimeout, kSystem.
std::unique_ptr<Wire> make_nccl_wire(const NcclOptions& options);
// For one rank to make and all to know.
std::string nccl_unique_id(const std::string& path);
// Why make_nccl_wire cannot work with the library there, in one sentence; empty if it can.
std::string why_no_nccl(const std::string& path);
// Such as "2.30.7". Throws kUnsupported.
std::string nccl_version(const std::string& path);

}  // namespace ringcomm
