// A transport carries bytes between hosts. The engine over hosts decides which messages go when; a transport moves them
// by send and receive of another library, in which every rank of the communicator takes part (bind/c10d/, nccl/).
//
// On the host an exchange's functions block until their work is done. A device's transport enqueues the work on
// `stream`, in order, and returns; it reports later errors to the failure handler.
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

// The time limit of a call, as a point in time.
using TransportClock = std::chrono::steady_clock;

struct Message {
  int peer;  // rank of the communicator
  void* data;
  std::size_t nbytes;
};

// Messages that are in flight together.
struct Round {
  std::vector<Message> sends, recvs;
};

// Thrown by a transport; the engine turns it into an error sentence.
struct __attribute__((visibility("default"))) TransportFailure {
  int peer;          // rank that did not answer; -1: no particular rank
  bool late;         // the limit has passed
  std::string what;  // the library's message
  // If the signatures differ: this rank's and the peer's, as exchanged.
  std::string mine = {}, theirs = {};
};

// The rounds of one exchange, in order: start(0), finish(0), start(1), ...
class TransportExchange {
 public:
  virtual ~TransportExchange() = default;
  virtual void start(int round) = 0;
  // Afterwards received data can be read, and sent data overwritten.
  virtual void finish(int round) = 0;
};

// The properties of a call that two ranks must agree on before a message of the call goes between them.
struct CallSignature {
  int peer;
  // Opaque bytes, followed by at most inline_bytes() of a message.
  std::string mine;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* kind() const = 0;  // such as "gloo" or "nccl"

  // The largest message that may follow the signature; 0 for transports that do not return the peers' signatures.
  virtual std::size_t inline_bytes() const { return 0; }
  // Exchanges signatures with each peer and returns theirs, in the order given. A device's transport may return before
  // it has them: then the result is empty, and it reports a difference to the failure handler.
  virtual std::vector<std::string> swap(const std::vector<CallSignature>& signatures, TransportClock::time_point limit,
                                        std::uintptr_t stream) = 0;

  // Opens an exchange whose messages match those of the exchanges that its peers open in the same `slot`, in the order
  // of opening. Exchanges in different slots may be in flight at once; where two ranks share several exchanges, both
  // start their rounds in the same order. Receives may begin as soon as the exchange is open.
  virtual std::unique_ptr<TransportExchange> open(int slot, std::vector<Round> rounds, TransportClock::time_point limit,
                                                  std::uintptr_t stream) = 0;

  // Starts a message of the user: Op::kSend or Op::kRecv, with a peer on another host. Messages between two ranks stay
  // in order per tag. Throws kUnsupported for calls that the library cannot do.
  virtual std::shared_ptr<Request> message(const Call& call, std::int64_t limit_ms) = 0;

  // Sets a function that host threads call regularly while they wait for a message, with the name of the call. It
  // returns true if a signal ends the call and abort() was called for it.
  virtual void on_wait([[maybe_unused]] std::function<bool(const char*)> interrupted) {}

  // Memory that can hold messages.
  virtual void* allocate(std::size_t nbytes) = 0;
  virtual void release(void* data) = 0;

  // Devices: `fork` returns the stream on which an asynchronous call runs after the present work of `stream`; `join`
  // returns the request of that call.
  virtual std::uintptr_t fork(std::uintptr_t stream) { return stream; }
  virtual std::shared_ptr<Request> join([[maybe_unused]] const Call& call, [[maybe_unused]] std::uintptr_t stream) {
    return nullptr;
  }
  // Devices: `enter` makes `stream` wait for the last call that used this transport; `leave` marks the end of a call on
  // it.
  virtual void enter([[maybe_unused]] std::uintptr_t stream) {}
  virtual void leave([[maybe_unused]] std::uintptr_t stream, [[maybe_unused]] const Call& call,
                     [[maybe_unused]] std::int64_t limit_ms) {}

  // Ends every wait on this rank; later ones fail at once. Callable from any thread, idempotent.
  virtual void abort() = 0;
  // Sets a handler that is called once, from any thread, with an error that no call was there to throw.
  virtual void on_failure([[maybe_unused]] std::function<void(const TransportFailure&)> handler) {}
  // Local. Finishes sends that were started.
  virtual void close() = 0;
  // Whether the caller is a thread of this transport that runs a callback; such a thread must not destroy the
  // transport.
  virtual bool runs_this_thread() const { return false; }
  // The payload that this rank has sent, in bytes.
  virtual std::uint64_t sent_bytes() const = 0;
  virtual std::vector<std::pair<std::string, std::string>> describe() const { return {}; }
};

// ---- NCCL, loaded at run time --------------------------------------------------------------------------------------

// The number of ids that a transport needs: for rounds, for messages from lower to higher ranks, and for those from
// higher to lower ranks.
inline constexpr std::size_t kNcclIds = 3;

struct NcclOptions {
  std::string path;  // of libnccl.so.2; empty: a loaded one, else the loader's choice
  int rank = 0, world_size = 1;
  std::vector<std::string> unique_ids;  // kNcclIds of them, the same on all ranks
  int device = 0;
  std::int64_t timeout_ms = 30 * 60 * 1000;  // for all ranks to arrive
};

// Makes the transport; a collective of all ranks. Throws kUnsupported without a usable NCCL, kTimeout, kSystem.
std::unique_ptr<Transport> make_nccl_transport(const NcclOptions& options);
// Makes an id; one rank calls this and sends the id to all others.
std::string nccl_unique_id(const std::string& path);
// Why make_nccl_transport cannot work with the library at `path`, in one sentence; empty if it can.
std::string why_no_nccl(const std::string& path);
// Returns for instance "2.30.7". Throws kUnsupported.
std::string nccl_version(const std::string& path);

}  // namespace ringcomm
