// send and recv between processes. Each ordered pair of ranks has its own links, one for every p2p channel: the board
// lies with the receiver. Window w of a message goes over channel w % channels.
//
// A long message has more windows on a channel than the link has slots, so its sender cannot finish before the receiver
// has begun. Its first ticket carries no data: it says where the source lies. A receiver that can access the source
// copies from there. Otherwise it says where its target lies, and a sender that can access the target copies to it.
// Only if neither can does the message go through the slots.
//
//   sender                                receiver
//   ticket t: signature, source    --->   compares the signature; copies if it can access the source
//   done if it was copied          <---   consumed = t + 1, with: copied or not, and the target
//   copies if it can access the target
//   ticket t + 1: copied or not    --->   done if it was copied               (only where the target is visible)
//   else windows, from the next ticket on
//
// Transfers between the same two ranks in the same direction share a link, and keep the order of the launch: the blocks
// of the first of them serve them all, and the blocks of the others return at once. Transfers of different peers or
// directions never wait for each other, so any set of matching transfers can be in one launch.
#include "cuda/device/kernels.h"
#include "cuda/device/link_ends.h"

namespace ringcomm::cuda {

namespace {

RINGCOMM_DEVICE bool share_a_link(const Transfer& a, const Transfer& b) {
  return a.peer == b.peer && a.sends == b.sends;
}

class TransferBlock {
 public:
  RINGCOMM_DEVICE TransferBlock(const Block& block, const Transfer& first)
      : block_(block),
        peer_(first.peer),
        sends_(first.sends),
        mine_(link(block.rank(), peer_)),
        theirs_(link(peer_, block.rank())),
        board_(Board::at((sends_ ? theirs_ : mine_) + block.layout().link_board_at(), block.layout().p2p_depth,
                         block.layout().p2p_slot_bytes)),
        credit_(reinterpret_cast<LinkCredit*>((sends_ ? mine_ : theirs_) + block.layout().link_credit_at())),
        ends_(block),
        ticket_(load_one(count())) {}

  // False: a wait gave up.
  RINGCOMM_DEVICE bool run(const Transfer& transfer) {
    const int channels = transfer.channels;
    u64 window = block_.channel();
    if (window >= static_cast<u64>(channels)) return true;
    const WindowCut cut = cut_for_channels(transfer.nbytes, 1, board_.slot_bytes, kLineBytes, kLeastBytes, channels);
    const Signature signature = sign(transfer);
    bool first = true;
    if (window + board_.depth * channels < cut.windows()) {
      if (sends_ ? offer(transfer, cut, signature) : answer(transfer, cut, signature)) return ends_.going();
      first = false;
    }
    if (!ends_.going()) return false;
    do {  // an empty message too: the peer must hear of it
      if (window > 0 && window >= cut.windows()) break;
      const Slice s = cut.slice(0, window);
      step(transfer.data + s.offset, static_cast<u32>(s.count), signature, first);
      first = false;
      window += channels;
    } while (ends_.going());
    return ends_.going();
  }
  RINGCOMM_DEVICE void close() const {
    block_.sync();
    if (block_.thread() == 0) store_one(count(), ticket_);
  }

 private:
  RINGCOMM_DEVICE char* link(int at, int peer) const {
    return block_.args().segment_of(at) + block_.layout().link_at(peer, block_.channel());
  }
  // The tickets of this direction, in this rank's own memory.
  RINGCOMM_DEVICE u64* count() const {
    ChannelState* const state = reinterpret_cast<ChannelState*>(mine_);
    return sends_ ? &state->sent : &state->received;
  }
  // The properties that both ends must agree on. The number of the first ticket takes the place of the call's number.
  RINGCOMM_DEVICE Signature sign(const Transfer& transfer) const {
    return {ticket_, 0, transfer.count, static_cast<std::uint8_t>(Op::kSend), static_cast<std::uint8_t>(transfer.dtype),
            0,       0, transfer.tag};
  }
  RINGCOMM_DEVICE void step(char* data, u32 nbytes, const Signature& signature, bool first) {
    if (sends_) {
      ends_.await_credit(&credit_->consumed, ticket_, board_.depth, peer_);
      if (ends_.ready()) copy_to_both(ends_.workers(), data, nbytes, board_.slot(ticket_), nullptr);
      ends_.publish(board_, ticket_, signature, first);
    } else {
      ends_.await_slice(board_, ticket_, peer_, WaitKind::kMessage, signature, first);
      if (ends_.ready()) copy_to_both(ends_.workers(), board_.slot(ticket_), nbytes, data, nullptr);
      ends_.release(&credit_->consumed, ticket_);
    }
    ++ticket_;
  }

  // ---- long messages ------------------------------------------------------------------------------------------------

  // True: the message has arrived without slots.
  RINGCOMM_DEVICE bool offer(const Transfer& transfer, const WindowCut& cut, const Signature& signature) {
    ends_.await_credit(&credit_->consumed, ticket_, board_.depth, peer_);
    if (ends_.ready() && block_.thread() == 0) store_one(&board_.header(ticket_)->input, transfer.at);
    ends_.publish(board_, ticket_, signature, true);
    ends_.await_credit(&credit_->consumed, ticket_, 0, peer_);
    ++ticket_;
    if (!ends_.all_ready()) return false;
    const Location target = load_one(&credit_->target);
    if (load_one(&credit_->pulled)) return true;
    if (!target.visible) return false;
    char* const to = find(target);
    if (to) copy_windows(transfer, cut, transfer.data, to);
    if (block_.thread() == 0) store_one(&board_.header(ticket_)->offset, u32{to != nullptr});
    ends_.publish(board_, ticket_++, signature, false);
    return to != nullptr;
  }
  RINGCOMM_DEVICE bool answer(const Transfer& transfer, const WindowCut& cut, const Signature& signature) {
    ends_.await_slice(board_, ticket_, peer_, WaitKind::kMessage, signature, true);
    if (!ends_.all_ready()) return false;
    const char* const from = find(load_one(&board_.header(ticket_)->input));
    if (from && RINGCOMM_FAULT != Fault::kSourceReleasedUnread) copy_windows(transfer, cut, from, transfer.data);
    if (block_.thread() == 0) {
      store_one(&credit_->pulled, std::int32_t{from != nullptr});
      store_one(&credit_->target, transfer.at);
    }
    ends_.release(&credit_->consumed, ticket_++);
    if (from && RINGCOMM_FAULT == Fault::kSourceReleasedUnread) copy_windows(transfer, cut, from, transfer.data);
    if (from) return true;
    if (!transfer.at.visible) return false;
    ends_.await_slice(board_, ticket_, peer_, WaitKind::kMessage, signature, false);
    if (!ends_.all_ready()) return false;
    const bool pushed = load_one(&board_.header(ticket_)->offset) != 0;
    ends_.release(&credit_->consumed, ticket_++);
    return pushed;
  }
  // The peer's memory as mapped on this rank; null: it is not mapped, or not yet. One thread asks, because the host may
  // add an arena at any time.
  RINGCOMM_DEVICE char* find(const Location& at) const {
    RINGCOMM_SHARED(char*, found);
    if (block_.thread() == 0) found = block_.resolve(peer_, at);
    block_.sync();
    char* const here = found;
    block_.sync();  // before the next one
    return here;
  }
  // Copies the windows of this channel.
  RINGCOMM_DEVICE void copy_windows(const Transfer& transfer, const WindowCut& cut, const char* from, char* to) const {
    for (u64 window = block_.channel(); window < cut.windows(); window += transfer.channels) {
      const Slice s = cut.slice(0, window);
      copy_run(block_, from + s.offset, s.count, to + s.offset);
    }
  }

  const Block& block_;
  const int peer_;
  const bool sends_;
  char* const mine_;
  char* const theirs_;
  const Board board_;
  LinkCredit* const credit_;
  LinkEnds ends_;
  u64 ticket_;
};

RINGCOMM_KERNEL(kMostThreads) send_and_receive(const __grid_constant__ TransferArgs args) {
  const Block block(args.layout, args.rank, args.timeout_ns);
  const int first = static_cast<int>(blockIdx.y);
  if (first >= args.num_transfers) return;
  for (int i = 0; i < first; ++i)  // an earlier one serves its link
    if (share_a_link(args.transfers[i], args.transfers[first])) return;
  TransferBlock transfers(block, args.transfers[first]);
  for (int i = first; i < args.num_transfers; ++i)
    if (share_a_link(args.transfers[i], args.transfers[first]) && !transfers.run(args.transfers[i])) return;
  transfers.close();
}

}  // namespace

Kernel<TransferArgs> transfer_kernel() { return send_and_receive; }

}  // namespace ringcomm::cuda
