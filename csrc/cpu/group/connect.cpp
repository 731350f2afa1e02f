#include "cpu/group/state.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <sstream>

#include "core/error.h"
#include "runtime/checksum.h"
#include "runtime/identity.h"
#include "runtime/observe/flight_recorder.h"
#include "runtime/registry.h"

namespace ringcomm::cpu {

namespace {

// The segments made in this process. Ranks that are threads share one mapping of each.
Registry<std::uint64_t, SharedMemory>& local_segments() {
  static auto* const segments = new Registry<std::uint64_t, SharedMemory>;  // outlives whatever is destroyed at exit
  return *segments;
}

constexpr const char* kVersion = "ringcomm-cpu-5";

struct Handle {
  std::string machine;
  int rank = -1, world_size = 0, pid = 0, fd = -1;
  std::uint64_t nonce = 0, process = 0;
  std::size_t slot_bytes = 0, p2p_slot_bytes = 0;

  std::string pack() const {
    return add_checksum(kVersion, concat(machine, ' ', rank, ' ', world_size, ' ', pid, ' ', fd, ' ', nonce, ' ',
                                         process, ' ', slot_bytes, ' ', p2p_slot_bytes));
  }
  static Handle unpack(const std::string& bytes, int rank) {
    Handle h;
    std::istringstream in(strip_checksum(kVersion, bytes, "cpu", rank));
    in >> h.machine >> h.rank >> h.world_size >> h.pid >> h.fd >> h.nonce >> h.process >> h.slot_bytes >>
        h.p2p_slot_bytes;
    return h;
  }
};

constexpr std::size_t kDefaultSlotBytes = 256 * 1024;

// Keeps all p2p boards of a rank together below 64 MiB of address space; pages are allocated when they are used.
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
      peers_(world_size),
      graph_(WaitGraph::of_this_process()) {
  Control& c = control();
  c.magic = kMagic;
  c.nonce = random_number();
  c.rank = rank;
  c.world_size = world_size;
  c.graph_nonce = graph_->place().nonce;
  c.graph_fd = graph_->place().fd;
  member_.party = &c.party.value;
  member_.abort = [this](const std::string& sentence) { abort(sentence, ErrorCode::kMismatch); };
  local_segments().add(c.nonce, mine_);
}

Group::~Group() {
  if (disowned_) return;
  forget();
  local_segments().remove(control().nonce);
}

std::string Group::handle() const {
  Handle h;
  h.machine = machine_identity({"pid"});  // where /proc/<pid> means the same process
  h.rank = rank_;
  h.world_size = world_size_;
  h.pid = getpid();
  h.fd = mine_->fd();
  h.nonce = control().nonce;
  h.process = process_number();
  h.slot_bytes = layout_.slot_bytes;
  h.p2p_slot_bytes = layout_.p2p_slot_bytes;
  return h.pack();
}

void Group::attach(int peer, const std::string& bytes) {
  const Handle h = Handle::unpack(bytes, rank_);
  const Handle own = Handle::unpack(handle(), rank_);
  if (peer == rank_ && bytes != handle())
    fail(ErrorCode::kInvalid, "connect: rank ", rank_, " expected its own handle at place ", rank_,
         ", got another one; pass every rank's handle, in rank order");
  if (h.machine != own.machine)
    fail(ErrorCode::kUnsupported, "connect: rank ", rank_, " is on machine ", own.machine, ", rank ", peer, " on ",
         h.machine, "; the cpu engine serves ranks of one host, in one PID namespace");
  if (h.rank != peer || h.world_size != world_size_)
    fail(ErrorCode::kInvalid, "connect: rank ", rank_, " expected the handle of rank ", peer, " of ", world_size_,
         ", got rank ", h.rank, " of ", h.world_size, "; pass every rank's handle, in rank order");
  if (h.slot_bytes != layout_.slot_bytes || h.p2p_slot_bytes != layout_.p2p_slot_bytes)
    fail(ErrorCode::kInvalid, "connect: rank ", rank_, " has slots of ", layout_.slot_bytes, " and ",
         layout_.p2p_slot_bytes, " bytes, rank ", peer, " of ", h.slot_bytes, " and ", h.p2p_slot_bytes,
         "; pass the same options on every rank");
  Peer& p = peers_[peer];
  p.pid = h.pid;
  p.arenas.resize(kMaxArenas);
  p.segment = h.process == own.process ? local_segments().find(h.nonce) : nullptr;
  try {
    if (!p.segment) p.segment = std::make_shared<SharedMemory>(SharedMemory::open(h.pid, h.fd, layout_.nbytes()));
  } catch (const Error& error) {
    const bool died = h.process != own.process && Process::of(h.pid)->exited();
    fail(died ? ErrorCode::kRankLost : error.code(), "connect: rank ", rank_, " expected the memory of ", named(peer),
         ", got this: ", error.what());
  }
  p.board = layout_.board(p.segment->data());
  if (control(peer).magic != kMagic || control(peer).nonce != h.nonce)
    fail(ErrorCode::kSystem, "connect: rank ", rank_, " found foreign memory where rank ", peer,
         " announced its segment; its process may have been replaced");
  if (h.process != own.process) p.process = Process::of(h.pid);
  shares_address_space_ = shares_address_space_ && h.process == own.process;
}

void Group::connect(const std::vector<std::string>& handles) {
  if (connected_) fail(ErrorCode::kInvalid, "connect: rank ", rank_, " is connected already; make a new engine");
  if (static_cast<int>(handles.size()) != world_size_)
    fail(ErrorCode::kInvalid, "connect: rank ", rank_, " expected ", world_size_, " handles, got ", handles.size(),
         "; pass every rank's handle, in rank order");
  shares_address_space_ = true;
  wait_policy_ = WaitPolicy::for_ranks(world_size_);
  attach_all(handles);
  for (int peer = 0; peer < world_size_; ++peer) fetch_add(&control(peer).attached.value, 1);
  store_release(&control().has_attached.value, 1);
  await_attached();
  mine_->close_fd();  // all ranks have mapped it; from now on no process can open it
  origin_ = {group_number(handles), rank_, world_size_, -1};
  connected_ = true;
  bool ranks_are_threads = false;
  for (int peer = 0; peer < world_size_; ++peer)
    ranks_are_threads = ranks_are_threads || (peer != rank_ && !peers_[peer].process);
  graph_->add(member_, origin_.group, ranks_are_threads);
}

// A handle that cannot be used aborts the ranks that are reachable, so that they do not wait for this one.
void Group::attach_all(const std::vector<std::string>& handles) {
  std::exception_ptr failure;
  for (int peer = 0; peer < world_size_; ++peer) try {
      attach(peer, handles[peer]);
    } catch (const Error&) {
      peers_[peer].segment = nullptr;
      if (!failure) failure = std::current_exception();
    }
  try {
    if (failure) std::rethrow_exception(failure);
  } catch (const Error& error) {
    abort(error.what(), error.code() == ErrorCode::kRankLost ? error.code() : ErrorCode::kAborted);
    throw;
  }
}

void Group::await_attached() {
  const std::int64_t limit_ms = timeout_ms;
  const auto end = Clock::now() + std::chrono::milliseconds(limit_ms);
  const Flag* attached = &control().attached.value;
  while (load_acquire(attached) < static_cast<std::uint64_t>(world_size_)) {
    if (aborted())
      fail(aborted_as(), "connect: rank ", rank_, " expected ", world_size_,
           " ranks to attach, got an abort: ", why_aborted(), "; create a new communicator");
    for (int peer = 0; peer < world_size_; ++peer)
      if (is_gone(peer) && !load_acquire(&control(peer).has_attached.value))
        fail(ErrorCode::kRankLost, "connect: rank ", rank_, " expected ", named(peer), " to attach, but ",
             why_gone(peer), "; see its own output, and connect the ranks that are left");
    if (interrupted()) {
      interrupt("connect");
      fail(ErrorCode::kAborted, "connect: rank ", rank_, " was interrupted by a signal");
    }
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
    const auto& record = control(peer).arenas[location.arena];
    arena = SharedMemory::open(peers_[peer].pid, record.fd, record.nbytes);
    // After an abort the arena may have been released, and its number belong to another file; see Heap::detach.
    if (aborted()) raise_end(static_cast<Op>(logged(rank_, sequence_).signature.op));
  }
  return arena.data() + location.where;
}

}  // namespace ringcomm::cpu
