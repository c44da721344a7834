// 4-bit linears of many rows on sm_90a; `paired_launcher.py` compiles and launches it and says what its constants mean:
// GROUPS, ROWS, STAGES, DEPTH, GROUP, SWATH, BF16, SCALE_BF16, BIAS, AHEAD, REGISTERS, and `multiply`, a wgmma of ROWS.
//
// A thread block computes tiles of 64 * GROUPS outputs and ROWS rows of x. Each group of four warps has 64 outputs: it
// decodes weights into registers, the left operand; x is the right operand, in shared memory, the same for all groups.
// A stage of the ring in shared memory has DEPTH times 64 inputs of both.
// Of four more warps (registers are handed over by fours) one loads words, scales and x ahead (PTX ISA 9.7:
// cp.async.bulk, mbarrier, wgmma, setmaxnreg).
//
// Two blocks, a cluster, work together: on two neighbouring tiles of the same rows, of which each loads one half for
// both; or, where there are not enough tiles for all blocks left, on one tile, each with half of the inputs. Then they
// join their sums through each other's shared memory.

using u32 = unsigned int;
using u64 = unsigned long long;
struct alignas(64) Map { char bytes[128]; };  // CUtensorMap

constexpr int X_BYTES = ROWS * 128, WORD_BYTES = GROUPS * 2048, META_BYTES = GROUPS * 256;  // of 64 inputs
constexpr int WORDS_AT = STAGES * DEPTH * X_BYTES, META_AT = WORDS_AT + STAGES * DEPTH * WORD_BYTES;
constexpr int OUT_AT = META_AT + STAGES * DEPTH * META_BYTES, FULL_AT = OUT_AT + GROUPS * 4096;
constexpr int EMPTY_AT = FULL_AT + STAGES * 8, JOINED_AT = EMPTY_AT + STAGES * 8;
constexpr int SUMS = ROWS / 2;     // float32 a thread
constexpr int PIECES = ROWS / 16;  // of a result: 16 rows
constexpr int MOST = (PIECES + 1) / 2;
static_assert(ROWS % 32 == 0, "pieces take turns with two places for results, also from one tile to the next");

#define INLINE __device__ __forceinline__

// Which block of a cluster finishes a piece of the result that both computed.
INLINE constexpr int finisher(int piece) { return piece * 2 / PIECES; }

INLINE u32 shared_address(const void *p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

INLINE void init_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
INLINE void arrive(u32 barrier) {  // in the shared memory of any block of the cluster
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
INLINE void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
INLINE void wait(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
      ::"r"(barrier), "r"(phase) : "memory");
}
INLINE void copy(u32 to, const void *from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
INLINE void copy(u32 to, const Map *map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
INLINE void copy_to_both(u32 to, const Map *map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<unsigned short>(3))
               : "memory");
}
// All threads of both blocks were here. What they wrote to memory may not be there yet.
INLINE void cluster_meeting() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
INLINE bool elected() {
  u32 one;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(one));
  return one;
}
INLINE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

INLINE u32 address_in(u32 rank, u32 address) {  // of a block of the cluster
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

INLINE u32 pair(float low, float high) {  // two float32 -> two of y's dtype
  u32 both;
  if (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
INLINE float number(unsigned short bits) {  // of y's dtype
  float value;
  if (BF16) value = __uint_as_float(static_cast<u32>(bits) << 16);
  else asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// meta (bits of a scale | zero << 16) -> the scale and what is to be added to BASE + code, twice each. BASE is 128
// (bfloat16) or 1024 (float16): there the last bit of the significand is 1.
INLINE void split_meta(u32 meta, u32 &scale, u32 &minus) {
  if (SCALE_BF16 == BF16) {
    scale = __byte_perm(meta, 0, 0x1010);
  } else {
    float value;
    if (SCALE_BF16) value = __uint_as_float(meta << 16);
    else asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(value) : "r"(meta));
    scale = pair(value, value);
  }
  minus = __byte_perm(meta, 0, 0x4242) | (BF16 ? 0xC300C300u : 0xE400E400u);
}

// Codes in slot SLOT of two inputs: codes less zero, exact, times scale, rounded. `base`: BASE, twice.
template <int SLOT> INLINE u32 weights(u32 word, u32 base, u32 scale, u32 minus) {
  u32 value = word >> (4 * SLOT);
  if (BF16) {
    asm("{\n.reg .b32 c, one;\nlop3.b32 c, %1, 0x000f000f, %4, 0xea;\nmov.b32 one, 0x3f803f80;\n"
        "fma.rn.bf16x2 c, c, one, %3;\nmov.b32 one, 0x80008000;\nfma.rn.bf16x2 %0, c, %2, one;\n}"
        : "=r"(value) : "r"(value), "r"(scale), "r"(minus), "r"(base));
  } else {
    asm("{\n.reg .b32 c;\nlop3.b32 c, %1, 0x000f000f, %4, 0xea;\nadd.f16x2 c, c, %3;\nmul.f16x2 %0, c, %2;\n}"
        : "=r"(value) : "r"(value), "r"(scale), "r"(minus), "r"(base));
  }
  return value;
}

struct Scales { u32 scale[2], minus[2]; };

INLINE void load_scales(Scales &scales, u32 meta_at) {
  u32 meta[2];
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(meta[0]) : "r"(meta_at) : "memory");
  asm volatile("ld.shared.u32 %0, [%1 + 32];" : "=r"(meta[1]) : "r"(meta_at) : "memory");
  split_meta(meta[0], scales.scale[0], scales.minus[0]);
  split_meta(meta[1], scales.scale[1], scales.minus[1]);
}

INLINE void load_words(uint4 &words, u32 words_at) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "r"(words_at) : "memory");
}

template <int SLOT> INLINE void decode(u32 (&left)[16], const uint4 &words, u32 base, const Scales &scales) {
  left[4 * SLOT] = weights<SLOT>(words.x, base, scales.scale[0], scales.minus[0]);
  left[4 * SLOT + 1] = weights<SLOT>(words.y, base, scales.scale[1], scales.minus[1]);
  left[4 * SLOT + 2] = weights<SLOT>(words.z, base, scales.scale[0], scales.minus[0]);
  left[4 * SLOT + 3] = weights<SLOT>(words.w, base, scales.scale[1], scales.minus[1]);
}

// A group's [64, 64], into the registers of a left operand.
INLINE void decode(u32 (&left)[16], const uint4 &words, u32 base, const Scales &scales) {
  decode<0>(left, words, base, scales);
  decode<1>(left, words, base, scales);
  decode<2>(left, words, base, scales);
  decode<3>(left, words, base, scales);
}

// The lower half of what wgmma takes for rows of 128 bytes in shared memory, swizzled by the copy engine.
INLINE u32 rows_at(u32 address) { return 1 << 16 | address >> 4; }

INLINE void begin_products(float (&sums)[SUMS]) {
#pragma unroll
  for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[i])::"memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
INLINE void products(float (&sums)[SUMS], const u32 (&left)[16], u32 x_at) {
  u32 rows = rows_at(x_at);
  begin_products(sums);
#pragma unroll
  for (int slot = 0; slot < 4; slot++)
    multiply(sums, left[4 * slot], left[4 * slot + 1], left[4 * slot + 2], left[4 * slot + 3], rows + 2 * slot);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LATER> INLINE void await_products(float (&sums)[SUMS]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
#pragma unroll
  for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

struct Work {
  int m, n, k, pairs_n, tiles_m;  // x [m, k], y [m, n]; pairs_n: of tiles
  int last_half;                  // rows that a box of the last tiles' x has (others': ROWS / 2)
  int pairs, items;               // pairs of tiles that clusters compute side by side; those and tiles that they share
  u32 rank;
};

struct Item {
  int n, m, first_step, steps;
  bool shared;
};

// SWATH pairs of tiles of N at a time, so that blocks that run together share what they read.
INLINE Item item_of(int i, const Work &work) {
  bool shared = i >= work.pairs;
  int pair = shared ? work.pairs + (i - work.pairs) / 2 : i, steps = (work.k + 64 * DEPTH - 1) / (64 * DEPTH);
  int first = pair / (SWATH * work.tiles_m) * SWATH, width = min(work.pairs_n - first, SWATH);
  int local = pair - first * work.tiles_m, half = shared ? (i - work.pairs) % 2 : work.rank;
  Item item = {(first + local % width) * 2 + half, local / width, 0, steps, shared};
  if (shared) item.first_step = work.rank * steps / 2, item.steps = (work.rank + 1) * steps / 2 - item.first_step;
  return item;
}

// Whether 64 inputs of a step need other scales than those before them.
INLINE bool begins_group(int step, int part, const Item &item, const Work &work) {
  u32 inputs = (step * DEPTH + part) * 64;
  return (part == 0 && step == item.first_step) ||
         (GROUP && inputs % (GROUP ? GROUP : 1) == 0 && (part == 0 || inputs < work.k));
}

struct Ring {
  int stage = 0;
  u32 phase = 0;
  INLINE void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// By a whole warp, of which one thread asks for the copies: numbers that are the same in all threads are cheap.
INLINE void load(u32 shared, const Map *x, const Map *last_x, const Map *words, const char *meta, const Work &work) {
  Ring ring;
  bool one = elected();
  asm volatile("griddepcontrol.wait;" ::: "memory");  // nothing of the kernels before is there yet
  for (int i = blockIdx.x / 2; i < work.items; i += gridDim.x / 2) {
    Item item = item_of(i, work);
    int meta_bytes = max(min(GROUPS, work.n / 64 - item.n * GROUPS), 0) * 256;
    const char *tile_meta = meta + static_cast<u64>(item.n) * META_BYTES;
    bool last = item.m == work.tiles_m - 1;
    const Map *map = last ? last_x : x;
    int half = last ? work.last_half : ROWS / 2;
#pragma unroll 1
    for (int step = item.first_step; step < item.first_step + item.steps; step++) {
      u32 full = shared + FULL_AT + 8 * ring.stage;
      wait(shared + EMPTY_AT + 8 * ring.stage, ring.phase ^ 1);
      if (one) {
        u32 bytes = DEPTH * (half * 256 + WORD_BYTES);
#pragma unroll
        for (int part = 0; part < DEPTH; part++)
          if (begins_group(step, part, item, work)) bytes += meta_bytes;
        expect(full, bytes);
#pragma unroll
        for (int part = 0; part < DEPTH; part++) {
          int place = ring.stage * DEPTH + part, column = step * DEPTH + part, row = item.m * ROWS;
          u32 to = shared + place * X_BYTES;
          if (item.shared) {
            copy(to, map, column * 64, row, full);
            copy(to + half * 128, map, column * 64, row + half, full);
          } else {
            copy_to_both(to + work.rank * half * 128, map, column * 64, row + work.rank * half, full);
          }
          copy(shared + WORDS_AT + place * WORD_BYTES, words, column * 256, item.n * GROUPS, full);
          if (meta_bytes && begins_group(step, part, item, work))
            copy(shared + META_AT + place * META_BYTES,
                 tile_meta + (GROUP ? static_cast<u64>(column * 64 / (GROUP ? GROUP : 1)) * work.n * 4 : 0),
                 static_cast<u32>(meta_bytes), full);
        }
      }
      ring.next();
    }
  }
}

// Rows [16 * piece, + 16) of a group's sums -> y, through 2 KiB of shared memory, so that threads write 16 bytes.
INLINE void store(const float *sums, int piece, u32 out_at, const float *bias, char *y, int row, const Work &work) {
  int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  u32 line = lane % 8 + lane / 16 * 8, chunk = warp * 2 + lane / 8 % 2, at = out_at + piece % 2 * 2048;
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at + line * 128 + (chunk ^ line % 8) * 16), "r"(pair(sums[0] + bias[0], sums[1] + bias[0])),
               "r"(pair(sums[2] + bias[1], sums[3] + bias[1])), "r"(pair(sums[4] + bias[0], sums[5] + bias[0])),
               "r"(pair(sums[6] + bias[1], sums[7] + bias[1])) : "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
  uint4 out;
  u32 from = thread / 8;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "r"(at + from * 128 + (thread % 8 ^ from % 8) * 16) : "memory");
  int to = row + 16 * piece + from;
  if (to < work.m) *reinterpret_cast<uint4 *>(y + static_cast<u64>(to) * work.n * 2 + thread % 8 * 16) = out;
}

// Each block of a cluster adds up the pieces that it finishes. Sums arrive as copies do, which a barrier counts: that
// is quicker than to make ordinary writes seen.
INLINE void join(float (&sums)[SUMS], u32 shared, u32 rank) {
  u32 there = address_in(rank ^ 1, shared), barrier = there + JOINED_AT, here = shared + threadIdx.x * 16;
  auto place = [&](int i) { return (i - finisher(i / 8) * MOST * 8) / 4 * GROUPS * 128 * 16; };
  cluster_meeting();  // nobody reads x any longer
#pragma unroll
  for (int i = 0; i < SUMS; i += 4)
    if (finisher(i / 8) != rank)
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                   ::"r"(there + threadIdx.x * 16 + place(i)), "f"(sums[i]), "f"(sums[i + 1]), "f"(sums[i + 2]),
                   "f"(sums[i + 3]), "r"(barrier) : "memory");
  wait(shared + JOINED_AT, 0);
#pragma unroll
  for (int i = 0; i < SUMS; i += 4)
    if (finisher(i / 8) == rank) {
      float4 part;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w) : "r"(here + place(i)) : "memory");
      sums[i] += part.x, sums[i + 1] += part.y, sums[i + 2] += part.z, sums[i + 3] += part.w;
    }
}

INLINE void compute(u32 shared, const unsigned short *p_bias, char *y, const Work &work) {
  int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  u32 words_at = shared + WORDS_AT + threadIdx.x * 16;
  u32 meta_at = shared + META_AT + (threadIdx.x / 32 * 16 + lane / 4) * 4;
  u32 out_at = shared + OUT_AT + group * 4096;
  u32 empties = address_in(lane % 2, shared + EMPTY_AT);  // two threads of a warp say it is done, one to each block
  u32 zero = static_cast<u32>(work.m) >> 31;  // which the compiler does not know
  Ring ring;
  for (int item_at = blockIdx.x / 2; item_at < work.items; item_at += gridDim.x / 2) {
    Item item = item_of(item_at, work);
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
    u32 a[16], b[16];
    Scales scales;
    // With AHEAD the products before run while weights are decoded; without, those of other groups. To wait after the
    // next products, not before, is what keeps the compiler from decoding only then. A step of two times 64 inputs pays
    // once for what it does besides, and decodes the second while it asks for the first products.
    u32 before = 0;
    auto step = [&](u32(&left)[16], u32(&next)[16], int i) {
      wait(shared + FULL_AT + 8 * ring.stage, ring.phase);
      u32 x_at = shared + ring.stage * DEPTH * X_BYTES, empty = empties + 8 * ring.stage;
      // The compiler shall know that all threads have the same: that saves time between products of one or two groups.
      if (GROUPS < 3) x_at = __shfl_sync(0xffffffff, x_at, 0);
      uint4 words[DEPTH];
#pragma unroll
      for (int part = 0; part < DEPTH; part++)
        load_words(words[part], words_at + (ring.stage * DEPTH + part) * WORD_BYTES);
      // Nothing is decoded before all words are there: the compiler asks for the last ones so late that products wait.
      u32 base = (BF16 ? 0x43004300 : 0x64006400) | (DEPTH > 1 ? words[DEPTH - 1].x & zero : 0);
#pragma unroll
      for (int part = 0; part < DEPTH; part++) {
        if (begins_group(item.first_step + i, part, item, work))
          load_scales(scales, meta_at + (ring.stage * DEPTH + part) * META_BYTES);
        decode(part ? next : left, words[part], base, scales);
        products(sums, part ? next : left, x_at + part * X_BYTES);
        await_products<AHEAD>(sums);
        if (AHEAD && part == 0 && lane < 2 && before) arrive(before);
      }
      if (!AHEAD && lane < 2) arrive(empty);
      before = empty;
      ring.next();
    };
    if (AHEAD && DEPTH == 1) {
      for (int i = 0;;) {
        step(a, a, i);
        if (++i == item.steps) break;
        step(b, b, i);
        if (++i == item.steps) break;
      }
    } else {
      for (int i = 0; i < item.steps; i++) step(a, b, i);
    }
    if (AHEAD) {
      await_products<0>(sums);
      if (lane < 2) arrive(before);
    }
    if (item.shared) join(sums, shared, work.rank);
    int n = (item.n * GROUPS + group) * 64;
    if (n >= work.n) continue;
    float bias[2] = {0, 0};
    const unsigned short *at = p_bias + n + warp * 16 + lane / 4;
    if (BIAS) bias[0] = number(at[0]), bias[1] = number(at[8]);
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++)
      if (!item.shared || finisher(piece) == work.rank)
        store(sums + 8 * piece, piece, out_at, bias, y + n * 2, item.m * ROWS, work);
  }
}

extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 128, 1) __cluster_dims__(2, 1, 1)
paired(const __grid_constant__ Map x, const __grid_constant__ Map last_x, const __grid_constant__ Map words,
       const char *meta, const unsigned short *bias, char *y, int m, int n, int k, int last_half, int pairs,
       int items) {
  extern __shared__ __align__(1024) char memory[];
  u32 shared = shared_address(memory);
  Work work = {m, n, k, (n / 64 + 2 * GROUPS - 1) / (2 * GROUPS), (m + ROWS - 1) / ROWS, last_half, pairs, items,
               cluster_rank()};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      init_barrier(shared + FULL_AT + 8 * i, 1);
      init_barrier(shared + EMPTY_AT + 8 * i, GROUPS * 4 * 2);
    }
    init_barrier(shared + JOINED_AT, 1);
    expect(shared + JOINED_AT, (work.rank ? PIECES - MOST : MOST) * GROUPS * 4096);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_meeting();
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");  // all blocks have their places by then
  if (threadIdx.x < GROUPS * 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    compute(shared, bias, y, work);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == GROUPS * 4) load(shared, &x, &last_x, &words, meta, work);
    __syncwarp();
    int last = work.items - 1 - (work.items - 1 - static_cast<int>(blockIdx.x / 2)) % static_cast<int>(gridDim.x / 2);
    if (last >= work.pairs) cluster_meeting();  // that of `join`
  }
  cluster_meeting();  // the other block still writes here, and says when it has done with what it got from here
}
