#include "cpu/group.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include "core/error.h"

namespace ringcomm::cpu {

namespace {

std::uint64_t random_nonce() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

// The same for all threads of this process, different in every other one, also after a fork.
std::uint64_t process_nonce() {
  static std::uint64_t nonce = random_nonce();
  static pid_t owner = getpid();
  if (owner != getpid()) {
    owner = getpid();
    nonce = random_nonce();
  }
  return nonce;
}

// The segments made in this process, so that ranks that are threads use one mapping of each.
class LocalSegments {
 public:
  static LocalSegments& get() {
    static LocalSegments segments;
    return segments;
  }
  void add(std::uint64_t nonce, const std::shared_ptr<SharedMemory>& segment) {
    const std::lock_guard<std::mutex> lock(mutex_);
    segments_[nonce] = segment;
  }
  void remove(std::uint64_t nonce) {
    const std::lock_guard<std::mutex> lock(mutex_);
    segments_.erase(nonce);
  }
  std::shared_ptr<SharedMemory> find(std::uint64_t nonce) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = segments_.find(nonce);
    return found == segments_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<SharedMemory>> segments_;
};

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Where /proc/<pid> means the same process: one kernel, one PID namespace.
std::string machine_identity() {
  char space[64] = {};
  if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) std::strcpy(space, "pid:[?]");
  return first_line("/proc/sys/kernel/random/boot_id") + "/" + space;
}

struct Handle {
  std::string machine;
  int rank = -1, world_size = 0, pid = 0, fd = -1;
  std::uint64_t nonce = 0, process = 0;
  std::size_t slot_bytes = 0, p2p_slot_bytes = 0;

  std::string pack() const {
    return concat("ringcomm-cpu-2 ", machine, ' ', rank, ' ', world_size, ' ', pid, ' ', fd, ' ', nonce, ' ', process,
                  ' ', slot_bytes, ' ', p2p_slot_bytes);
  }
  static Handle unpack(const std::string& bytes, int rank) {
    Handle h;
    std::string version;
    std::istringstream in(bytes);
    in >> version >> h.machine >> h.rank >> h.world_size >> h.pid >> h.fd >> h.nonce >> h.process >> h.slot_bytes >>
        h.p2p_slot_bytes;
    if (!in || version != "ringcomm-cpu-2")
      fail(ErrorCode::kInvalid, "connect: rank ", rank, " expected handles of this version of the cpu engine, got \"",
           bytes.substr(0, 40), "\"; install one version of ringcomm everywhere");
    return h;
  }
};

constexpr const char* kAdvice = "; the communicator is aborted, create a new one";

constexpr std::size_t kDefaultSlotBytes = 256 * 1024;

// Keeps all p2p boards of a rank together under 64 MiB of address space; pages are taken as they are used.
std::size_t default_p2p_slot_bytes(int world_size) {
  return std::clamp<std::size_t>((64u << 20) / ((kP2pDepth + 1) * world_size) / 4096 * 4096, 16 * 1024, 256 * 1024);
}

}  // namespace

Group::Group(int rank, int world_size, const EngineOptions& options)
    : timeout_ms(options.timeout_ms),
      rank_(rank),
      world_size_(world_size),
      layout_{options.slot_bytes ? options.slot_bytes : kDefaultSlotBytes, default_p2p_slot_bytes(world_size),
              world_size},
      mine_(std::make_shared<SharedMemory>(SharedMemory::create("ringcomm", layout_.nbytes()))),
      peers_(world_size) {
  Control& c = control();
  c.magic = kMagic;
  c.nonce = random_nonce();
  c.rank = rank;
  c.world_size = world_size;
  LocalSegments::get().add(c.nonce, mine_);
}

Group::~Group() {
  if (!disowned_) LocalSegments::get().remove(control().nonce);
}

std::string Group::handle() const {
  Handle h;
  h.machine = machine_identity();
  h.rank = rank_;
  h.world_size = world_size_;
  h.pid = getpid();
  h.fd = mine_->fd();
  h.nonce = control().nonce;
  h.process = process_nonce();
  h.slot_bytes = layout_.slot_bytes;
  h.p2p_slot_bytes = layout_.p2p_slot_bytes;
  return h.pack();
}

void Group::attach(int peer, const std::string& bytes) {
  const Handle h = Handle::unpack(bytes, rank_);
  const Handle own = Handle::unpack(handle(), rank_);
  if (h.machine != own.machine)
    fail(ErrorCode::kUnsupported, "connect: rank ", rank_, " is on machine ", own.machine, ", rank ", peer, " on ",
         h.machine, "; the cpu engine serves ranks of one host, in one PID namespace");
  if (h.rank != peer || h.world_size != world_size_)
    fail(ErrorCode::kInvalid, "connect: rank ", rank_, " expected the handle of rank ", peer, " of ", world_size_,
         ", got rank ", h.rank, " of ", h.world_size, "; pass every rank's handle, in rank order");
  if (h.slot_bytes != layout_.slot_bytes)
    fail(ErrorCode::kInvalid, "connect: rank ", rank_, " has slots of ", layout_.slot_bytes, " bytes, rank ", peer,
         " of ", h.slot_bytes, "; pass the same options on every rank");
  Peer& p = peers_[peer];
  p.pid = h.pid;
  p.arenas.resize(kMaxArenas);
  p.segment = h.process == own.process ? LocalSegments::get().find(h.nonce) : nullptr;
  if (!p.segment) p.segment = std::make_shared<SharedMemory>(SharedMemory::open(h.pid, h.fd, layout_.nbytes()));
  p.board = layout_.board(p.segment->data());
  if (control(peer).magic != kMagic || control(peer).nonce != h.nonce)
    fail(ErrorCode::kSystem, "connect: rank ", rank_, " found foreign memory where rank ", peer,
         " announced its segment; its process may have been replaced");
  shares_address_space_ = shares_address_space_ && h.process == own.process;
}

void Group::connect(const std::vector<std::string>& handles, std::int64_t connect_timeout_ms) {
  if (connected_) fail(ErrorCode::kInvalid, "connect: rank ", rank_, " is connected already; make a new engine");
  if (static_cast<int>(handles.size()) != world_size_)
    fail(ErrorCode::kInvalid, "connect: rank ", rank_, " expected ", world_size_, " handles, got ", handles.size());
  shares_address_space_ = true;
  patience_ = Patience::for_ranks(world_size_);
  for (int peer = 0; peer < world_size_; ++peer) attach(peer, handles[peer]);
  for (int peer = 0; peer < world_size_; ++peer) fetch_add(&control(peer).attached.value, 1);
  await_attached(connect_timeout_ms);
  mine_->close_fd();  // everyone has it; from here on no process can open it
  connected_ = true;
}

void Group::await_attached(std::int64_t limit_ms) {
  const auto end = Clock::now() + std::chrono::milliseconds(limit_ms);
  const Flag* attached = &control().attached.value;
  while (load_acquire(attached) < static_cast<std::uint64_t>(world_size_)) {
    if (Clock::now() > end)
      fail(ErrorCode::kTimeout, "connect: rank ", rank_, " waited ", limit_ms, " ms for ", world_size_,
           " ranks to attach, got ", load_acquire(attached), "; see whether the others have failed");
    usleep(100);
  }
}

Board Group::p2p_board(int source, int destination) const {
  return layout_.p2p_board(peers_[source].segment->data(), destination);
}

int Group::add_arena(const SharedMemory& memory) {
  const std::lock_guard<std::mutex> lock(arenas_mutex_);
  if (num_arenas_ == kMaxArenas)
    fail(ErrorCode::kSystem, "empty: rank ", rank_, " has used all ", kMaxArenas,
         " arenas of this communicator; release arrays or use fewer, larger ones");
  control().arenas[num_arenas_] = {memory.nbytes(), memory.fd()};
  return num_arenas_++;
}

char* Group::resolve(int peer, const Location& location) {
  if (location.arena < 0) return reinterpret_cast<char*>(location.where);
  SharedMemory& arena = peers_[peer].arenas[location.arena];
  if (!arena.data()) {
    const ArenaRecord& record = control(peer).arenas[location.arena];
    arena = SharedMemory::open(peers_[peer].pid, record.fd, record.nbytes);
  }
  return arena.data() + location.where;
}

void Group::wait(int peer, const Flag* flag, std::uint64_t target, const Deadline& deadline) const {
  if (load_acquire(flag) >= target) return;
  wait_flag(flag, target, &control(peer).sleepers.value, patience_, [&] {
    check_abort(*deadline.call);
    compare_calls(*deadline.call);
    if (deadline.passed())
      give_up(ErrorCode::kTimeout,
              missing(peer, *deadline.call) + concat(" within ", deadline.timeout_ms / 1000.0,
                                                     " s; see whether it has stalled or calls something else"));
    if (has_exited(peer) && load_acquire(flag) < target)
      give_up(ErrorCode::kAborted, missing(peer, *deadline.call) + ", and its process has exited; see its own error");
  });
}

// "all_reduce #7: rank 0 expected rank 1 (process 42) in this call, got it in call #5"; calls count from 0.
std::string Group::missing(int peer, const Call& call) const {
  const std::uint64_t mine = load_relaxed(&control().calls.value), theirs = load_relaxed(&control(peer).calls.value);
  const std::string got = theirs >= mine ? "got no answer from it"
                          : theirs == 0  ? "got no call from it"
                                         : concat("got it in call #", theirs - 1);
  return concat(name(call.op), " #", mine - 1, ": rank ", rank_, " expected rank ", peer, " (process ",
                peers_[peer].pid, ") in this call, ", got);
}

void Group::begin_call(std::uint64_t sequence, std::uint64_t hash) {
  sequence_ = sequence;
  logged_ = (hash & ~0xffffull) | ((sequence + 1) & 0xffff);
  store_release(&control().log[sequence % kLoggedCalls], logged_);
  store_relaxed(&control().calls.value, sequence + 1);
}

void Group::compare_calls(const Call& call) const {
  for (int peer = 0; peer < world_size_; ++peer) {
    const std::uint64_t theirs = load_acquire(&control(peer).log[sequence_ % kLoggedCalls]);
    if (theirs == logged_ || (theirs & 0xffff) != (logged_ & 0xffff)) continue;  // the same, or not there, or gone on
    give_up(ErrorCode::kMismatch,
            concat(name(call.op), " #", sequence_, ": rank ", rank_, " expected rank ", peer,
                   " to make the same call, got another one (op, count, dtype, root, or an earlier call differ); every "
                   "rank must make the same calls in the same order"));
  }
}

void Group::ring_bell(int peer) const {
  Control& c = control(peer);
  if (load_after_store(&c.bell_sleepers.value) == 0) return;
  fetch_add(&c.doorbell.value, 1);
  futex_wake(&c.doorbell.value);
}

Deadline Group::deadline(const Call& call) const {
  return {&call, call.timeout_ms > 0 ? call.timeout_ms : timeout_ms.load(std::memory_order_relaxed)};
}

void Group::abort(const std::string& reason) const {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (!peers_[peer].segment && peer != rank_) continue;
    Control& c = peer == rank_ ? control() : control(peer);
    if (!claim(&c.abort.value, 0, 1)) continue;  // the first reason stays
    std::strncpy(c.reason, reason.c_str(), sizeof c.reason - 1);
    store_release(&c.abort.value, 2);
    fetch_add(&c.doorbell.value, 1);
    futex_wake(&c.doorbell.value);
  }
}

std::string Group::why_aborted() const {
  if (!aborted()) return {};
  Control& c = control();
  // Whoever claimed the abort writes the reason next, unless it was killed in between.
  for (int i = 0; i < 1000 && load_acquire(&c.abort.value) == 1; ++i) usleep(100);
  return load_acquire(&c.abort.value) == 2 ? c.reason : "the reason was lost with its rank";
}

void Group::check_abort(const Call& call) const {
  if (!aborted()) return;
  fail(ErrorCode::kAborted, name(call.op), ": rank ", rank_,
       " expected an open communicator, got an abort: ", why_aborted(), kAdvice);
}

void Group::give_up(ErrorCode code, const std::string& message) const {
  abort(message);
  throw Error(code, message + kAdvice);
}

bool Group::has_exited(int peer) const {
  return !shares_address_space_ && kill(peers_[peer].pid, 0) != 0 && errno == ESRCH;
}

}  // namespace ringcomm::cpu
