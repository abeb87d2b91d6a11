/* farflock.compression._kernel: encode and decode in one pass through memory, with results equal to
 * the torch version's to the bit.
 *
 *   SETS: names of the instruction sets that this processor runs, the plainest (slowest) first.
 *   encode(set, codec, x, count, block, chunk, out) -> bool: append the payload of the floats x to
 *       the bytearray out.
 *   decode(set, codec, payload, x, count, block, chunk) -> bool: overwrite the floats x.
 *   peak(set, x, count) -> float: the largest magnitude; NaN if one is NaN.
 *   nesterov(set, phi, delta, momentum, count, lr, mu), scale(set, x, count, factor, out),
 *       add_scaled(set, sum, x, count, weight), subtract(set, a, b, count, out): elementwise.py.
 *
 * Tensors are addresses of `count` float32 values that the caller keeps alive: data_ptr(), which
 * takes a tenth of the time of a buffer made from the tensor. `block` and `chunk` are the codec's
 * numbers, 0 where it has none. False means that the input is not valid: nothing has changed, and
 * the caller runs the torch version, which says what is wrong. The loops run without Python's lock.
 */

#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <float.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#if FLT_EVAL_METHOD != 0 || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernel needs float32 arithmetic without excess precision, and little endian memory"
#endif

enum { PIECE = 1024, INT4_ZERO = 8, INFINITY_BITS = 0x7F800000, MIN_SCALE_BITS = 0x00800000 };
enum { MAX_BF16_BITS = 0x7F7F, MAX_WIDTH = 16, RUN = 64, FEW = 4 };
enum { SLIGHTLY = 1 << 19 }; /* of a float's bits: 3 to 6 % */
/* ecsq.py has these five. */
enum { MAX_CODE = 4096, LARGEST_BITS = 0x7F000000, STEP_RANGE = 11 << 7, MIN_STEP = 0x80 };
enum { HEAD = 10 };
/* A magnitude that is BELOW_ONE bf16 numbers below a step has code 0. */
enum { BELOW_ONE = 130, BINS = STEP_RANGE + BELOW_ONE + 2, TABLES = 4 };

/* Gathers the lowest bits of eight bytes in the top byte; spreads four bits over four lanes. */
#define GATHER 0x0102040810204080u
#define SPREAD 0x0000200040008001u
#define LANES 0x0001000100010001u
#define EVEN_BITS 0x5555555555555555u

#define ROUND 0x1.8p23f

/* Unaligned, since payloads start at any address. */
typedef float loose_f32 __attribute__((aligned(1), may_alias));
typedef double loose_f64 __attribute__((aligned(1), may_alias));
typedef int32_t loose_i32 __attribute__((aligned(1), may_alias));
typedef uint32_t loose_u32 __attribute__((aligned(1), may_alias));
typedef uint16_t loose_u16 __attribute__((aligned(1), may_alias));

/* The payloads of those before LISTS have a length that follows from the number of values. */
enum codec { FP32, FP16, BF16, INT8, INT4, FP4, SIGN, TOPK, LISTS, TOPK2 = LISTS, ECSQ, CODECS };
static const char *const NAMES[CODECS] = {"fp32", "fp16", "bf16", "int8", "int4",
                                          "fp4",  "sign", "topk", "topk2", "ecsq"};

/* The number of values, and the codec's numbers: `block` values per block (for top-k, values kept
 * of each chunk), `chunk` values per chunk, and `bits` per position in a chunk. */
struct shape {
    size_t count, block, chunk;
    unsigned bits;
};

struct levels {
    float top, zero;   /* the largest code, and how code 0 is written */
    int32_t max_scale; /* bits of the largest scale whose product with the largest code is finite */
    bool powers;       /* codes are powers of two */
};
static const struct levels LEVELS_INT8 = {127, 0, 0x7C010203, false};
static const struct levels LEVELS_INT4 = {7, INT4_ZERO, 0x7E124924, false};
static const struct levels LEVELS_FP4 = {64, 0, 0x7C7FFFFF, true};
static const struct levels LEVELS_SIGN = {1, 0, 0x7F7FFFFF, false};

static inline int32_t bits_of(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(int32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

static inline size_t blocks_of(size_t count, size_t block)
{
    return count / block + (count % block != 0);
}

/* The scale of values whose largest magnitude has these bits; where the scale is 0, `divisor` makes
 * all codes 0. */
static inline float scale_of(int32_t most, struct levels levels, float *divisor)
{
    int32_t bits = bits_of(float_of(most) / levels.top);
    if (bits > levels.max_scale)
        bits = levels.max_scale;
    *divisor = bits < MIN_SCALE_BITS ? 1.0f : float_of(bits);
    return bits < MIN_SCALE_BITS ? 0.0f : float_of(bits);
}

/* The value of a stored code: 0, or a sign and a power of two. Three bits in an exponent's place
 * are that power over 2^126, and 0 is 0. */
static inline float power_of(uint32_t stored)
{
    return float_of((int32_t)((stored & 7) << 23 | (stored & 8) << 28)) * 0x1p126f;
}

/* --- top-k's positions: `bits` bits each, lowest first, one after the other --- */

static inline size_t kept_of(struct shape s)
{
    return s.count / s.chunk * s.block + least(s.block, s.count % s.chunk);
}

static inline size_t position_bytes(struct shape s) { return blocks_of(kept_of(s) * s.bits, 8); }

struct stream {
    uint8_t *to;
    uint64_t held;
    unsigned fill;
};

static inline void put(struct stream *s, uint32_t position, unsigned bits)
{
    s->held |= (uint64_t)position << s->fill;
    for (s->fill += bits; s->fill >= 8; s->fill -= 8, s->held >>= 8)
        *s->to++ = (uint8_t)s->held;
}

static inline void put_rest(struct stream *s)
{
    if (s->fill)
        *s->to = (uint8_t)s->held;
}

/* The i-th position. It may read four bytes, since a scale and a code follow the last position. */
static inline uint32_t position(const uint8_t *in, size_t i, unsigned bits)
{
    return *(const loose_u32 *)(in + i * bits / 8) >> i * bits % 8 & ((1u << bits) - 1);
}

/* Scratch memory for selecting one chunk's values, in one allocation that begins at `place`. */
struct kept {
    loose_i32 *place, *bits, *spare;
    loose_f32 *values;
    loose_f64 *sums; /* two for each value kept */
};

static struct kept kept_for(struct shape s)
{
    size_t width = least(s.chunk, s.count);
    size_t k = blocks_of(s.block, RUN) * RUN;
    loose_i32 *room = malloc((2 * width + FEW + 6 * k) * sizeof *room);
    loose_i32 *bits = room + width + FEW, *spare = bits + width, *values = spare + k;
    return (struct kept){room, bits, spare, (loose_f32 *)values, (loose_f64 *)(values + k)};
}

/* --- top-k in two bits: a short chunk keeps its share --- */

static inline size_t share_of_chunk(struct shape s, size_t count)
{
    size_t share = (2 * count * s.block + s.chunk) / (2 * s.chunk);
    return share ? share : 1;
}

static inline size_t share_of(struct shape s)
{
    size_t rest = s.count % s.chunk;
    return s.count / s.chunk * s.block + (rest ? share_of_chunk(s, rest) : 0);
}

#include "bits.h"

/* --- ecsq: `block` is the rate --- */

#define ROUND_UP 0.3125f

/* A magnitude in whole steps, of which there are not more than an integer holds. */
static inline int32_t steps_in(float size, float step) { return (int32_t)(size / step + ROUND_UP); }

static inline size_t ecsq_max_bytes(struct shape s)
{
    return HEAD + 11 + blocks_of(s.count * (s.block > 200 ? s.block : 200), 800);
}

/* --- the loops, once for each instruction set --- */

struct loops {
    const char *set;
    int32_t (*peak)(const loose_f32 *, size_t);
    bool (*encode[LISTS])(const loose_f32 *, struct shape, uint8_t *);
    bool (*decode[LISTS])(const uint8_t *, struct shape, loose_f32 *);
    /* These return the payload's length, 0 if they refuse, and are given it. */
    size_t (*encode_lists[CODECS - LISTS])(const loose_f32 *, struct shape, uint8_t *);
    bool (*decode_lists[CODECS - LISTS])(const uint8_t *, size_t, struct shape, loose_f32 *);
    void (*nesterov)(loose_f32 *, const loose_f32 *, loose_f32 *, size_t, float, float);
    void (*scale)(const loose_f32 *, size_t, float, loose_f32 *);
    void (*add_scaled)(loose_f32 *, const loose_f32 *, size_t, float);
    void (*subtract)(const loose_f32 *, const loose_f32 *, size_t, loose_f32 *);
};

/* clang-format off */
#define LOOPS(set) { set, SET(peak), \
    {SET(encode_fp32), SET(encode_fp16), SET(encode_bf16), \
     SET(encode_int8), SET(encode_int4), SET(encode_fp4), SET(encode_sign), SET(encode_topk)}, \
    {SET(decode_fp32), SET(decode_fp16), SET(decode_bf16), \
     SET(decode_int8), SET(decode_int4), SET(decode_fp4), SET(decode_sign), SET(decode_topk)}, \
    {SET(encode_topk2), SET(encode_ecsq)}, {SET(decode_topk2), SET(decode_ecsq)}, \
    SET(nesterov), SET(scale), SET(add_scaled), SET(subtract) }
/* clang-format on */

#define SET(name) name##_plain
#define TARGET
#define EXTRACT extract
#define DEPOSIT deposit
#include "all.h"
static const struct loops PLAIN = LOOPS("plain");
#undef SET
#undef TARGET
#undef EXTRACT
#undef DEPOSIT

#ifdef __x86_64__
#define USE_AVX2
#define EXTRACT _pext_u64
#define DEPOSIT _pdep_u64

#define SET(name) name##_avx2
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))
#include "all.h"
static const struct loops AVX2 = LOOPS("avx2");
#undef SET
#undef TARGET

#define SET(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,popcnt")))
#include "all.h"
static const struct loops AVX512 = LOOPS("avx512");
#endif

/* Fill `found` with the loops that this processor runs, the plainest first; return their number. */
static size_t runnable(const struct loops *found[3])
{
    size_t count = 0;
    found[count++] = &PLAIN;
#ifdef __x86_64__
    __builtin_cpu_init();
    bool bits = __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                __builtin_cpu_supports("popcnt");
    if (bits && __builtin_cpu_supports("avx2"))
        found[count++] = &AVX2;
    if (bits && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found[count++] = &AVX512;
#endif
    return count;
}

/* --- Python's side: all arguments are checked here --- */

static const struct loops *loops_of(const char *set)
{
    const struct loops *found[3];
    for (size_t i = runnable(found); i--;)
        if (!strcmp(found[i]->set, set))
            return found[i];
    PyErr_Format(PyExc_ValueError,
                 "this processor or build has no instruction set '%s'; choose one of SETS", set);
    return NULL;
}

static int codec_of(const char *name)
{
    for (int codec = 0; codec < CODECS; codec++)
        if (!strcmp(NAMES[codec], name))
            return codec;
    PyErr_Format(PyExc_ValueError, "the kernel has no codec '%s'", name);
    return -1;
}

/* The parsed arguments of a call. */
struct call {
    const struct loops *loops;
    int codec;
    struct shape shape;
};

static bool understand(struct call *call, const char *set, const char *name, Py_ssize_t count,
                       Py_ssize_t block, Py_ssize_t chunk)
{
    call->loops = loops_of(set);
    call->codec = call->loops ? codec_of(name) : -1;
    if (call->codec < 0)
        return false;
    bool pairs = call->codec == INT4 || call->codec == FP4;
    bool blocks = pairs || call->codec == INT8 || call->codec == SIGN;
    bool chunks = call->codec == TOPK || call->codec == TOPK2;
    bool fits = 0 <= count && count <= PY_SSIZE_T_MAX / 512 && block <= 65536 && chunk <= 65536;
    fits = fits && (call->codec != ECSQ || (1 <= block && block <= 250));
    fits = fits && (!blocks || (block >= 1 && (!pairs || block % 2 == 0)));
    fits = fits && (!chunks || (block >= 1 && block <= chunk / 2));
    if (!fits) {
        PyErr_Format(PyExc_ValueError,
                     "the kernel cannot run %s on %zd values with block %zd and chunk %zd; "
                     "give numbers that the codec allows",
                     name, count, block, chunk);
        return false;
    }
    call->shape = (struct shape){(size_t)count, (size_t)block, (size_t)chunk, 0};
    while ((Py_ssize_t)1 << call->shape.bits < chunk)
        call->shape.bits++;
    return true;
}

/* The length of the longest correct payload. */
static size_t payload_bytes(const struct call *call)
{
    struct shape s = call->shape;
    switch (call->codec) {
    case FP32: return 4 * s.count;
    case INT8: return 4 * blocks_of(s.count, s.block) + s.count;
    case INT4:
    case FP4: return 4 * blocks_of(s.count, s.block) + blocks_of(s.count, 2);
    case SIGN: return 4 * blocks_of(s.count, s.block) + blocks_of(s.count, 8);
    case TOPK: return position_bytes(s) + 4 * blocks_of(s.count, s.chunk) + kept_of(s);
    case TOPK2:
        return 4 * blocks_of(s.count, s.chunk) + blocks_of(share_of(s), 4) +
               rice_max_bytes(share_of(s), s.count - share_of(s));
    case ECSQ: return ecsq_max_bytes(s);
    default: return 2 * s.count;
    }
}

/* The room that an encoder needs: those of lists write ahead of their last bit, and ecsq tries one
 * width more. */
static size_t room_for(const struct call *call)
{
    size_t longest = payload_bytes(call), three_planes = 3 * (call->shape.count / 8 + 8);
    if (call->codec == ECSQ)
        longest = longest > three_planes ? longest : three_planes;
    return longest + (call->codec >= LISTS ? SLACK : 0);
}

/* Write the payload; return its length, 0 if the encoder refuses. */
static size_t run_encoder(const struct call *call, const loose_f32 *x, uint8_t *out)
{
    bool fits = call->shape.count <= INT32_MAX; /* lists send counts in 32 bits */
    if (call->codec >= LISTS)
        return fits ? call->loops->encode_lists[call->codec - LISTS](x, call->shape, out) : 0;
    return call->loops->encode[call->codec](x, call->shape, out) ? payload_bytes(call) : 0;
}

static PyObject *encode(PyObject *self, PyObject *args)
{
    const char *set, *name;
    unsigned long long x;
    Py_ssize_t count, block, chunk;
    PyObject *out;
    Py_buffer to;
    struct call call;
    size_t written = 0;
    if (!PyArg_ParseTuple(args, "ssKnnnY", &set, &name, &x, &count, &block, &chunk, &out))
        return NULL;
    if (!understand(&call, set, name, count, block, chunk))
        return NULL;
    Py_ssize_t before = PyByteArray_Size(out), room = (Py_ssize_t)room_for(&call);
    if (PyByteArray_Resize(out, before + room) < 0)
        return NULL;
    /* The buffer keeps `out` in place while the lock is released. */
    if (PyObject_GetBuffer(out, &to, PyBUF_WRITABLE) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (count) /* an empty tensor's address is 0 */
        written = run_encoder(&call, (const loose_f32 *)(uintptr_t)x, (uint8_t *)to.buf + before);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&to);
    if ((Py_ssize_t)written != room && PyByteArray_Resize(out, before + (Py_ssize_t)written) < 0)
        return NULL;
    return PyBool_FromLong(written || !count);
}

/* Decode a payload of variable length from a copy, which has SLACK and which nobody changes. */
static bool decode_copy(const struct call *call, const uint8_t *payload, size_t length,
                        loose_f32 *out)
{
    bool fits = call->shape.count <= INT32_MAX && length <= payload_bytes(call);
    uint8_t *copy = fits ? calloc(1, length + SLACK) : NULL;
    bool good = copy && memcpy(copy, payload, length) &&
                call->loops->decode_lists[call->codec - LISTS](copy, length, call->shape, out);
    free(copy);
    return good;
}

static PyObject *decode(PyObject *self, PyObject *args)
{
    const char *set, *name;
    unsigned long long x;
    Py_ssize_t count, block, chunk;
    Py_buffer payload;
    struct call call;
    bool good = false;
    if (!PyArg_ParseTuple(args, "ssy*Knnn", &set, &name, &payload, &x, &count, &block, &chunk))
        return NULL;
    bool understood = understand(&call, set, name, count, block, chunk);
    loose_f32 *out = (loose_f32 *)(uintptr_t)x;
    if (understood && (!count || call.codec >= LISTS)) {
        Py_BEGIN_ALLOW_THREADS
        good = count ? decode_copy(&call, payload.buf, (size_t)payload.len, out) : !payload.len;
        Py_END_ALLOW_THREADS
    } else if (understood && (size_t)payload.len == payload_bytes(&call)) {
        Py_BEGIN_ALLOW_THREADS
        good = call.loops->decode[call.codec](payload.buf, call.shape, out);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&payload);
    return understood ? PyBool_FromLong(good) : NULL;
}

static PyObject *peak(PyObject *self, PyObject *args)
{
    const char *set;
    unsigned long long x;
    Py_ssize_t count;
    const struct loops *loops;
    int32_t bits;
    if (!PyArg_ParseTuple(args, "sKn", &set, &x, &count) || !(loops = loops_of(set)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    bits = loops->peak((const loose_f32 *)(uintptr_t)x, count > 0 ? (size_t)count : 0);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble((double)float_of(bits));
}

/* --- elementwise: four tensors at most, and their length --- */

static loose_f32 *tensor_at(unsigned long long address) { return (loose_f32 *)(uintptr_t)address; }

/* Return the loops for a call on `count` values, or NULL with an error. */
static const struct loops *loops_for(const char *set, Py_ssize_t count)
{
    if (count < 0) {
        PyErr_Format(PyExc_ValueError, "the kernel cannot run on %zd values", count);
        return NULL;
    }
    return loops_of(set);
}

static PyObject *nesterov(PyObject *self, PyObject *args)
{
    const char *set;
    unsigned long long phi, delta, momentum;
    Py_ssize_t count;
    float lr, mu;
    const struct loops *loops;
    if (!PyArg_ParseTuple(args, "sKKKnff", &set, &phi, &delta, &momentum, &count, &lr, &mu) ||
        !(loops = loops_for(set, count)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    loops->nesterov(tensor_at(phi), tensor_at(delta), tensor_at(momentum), (size_t)count, lr, mu);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *scale(PyObject *self, PyObject *args)
{
    const char *set;
    unsigned long long x, out;
    Py_ssize_t count;
    float factor;
    const struct loops *loops;
    if (!PyArg_ParseTuple(args, "sKnfK", &set, &x, &count, &factor, &out) ||
        !(loops = loops_for(set, count)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    loops->scale(tensor_at(x), (size_t)count, factor, tensor_at(out));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *add_scaled(PyObject *self, PyObject *args)
{
    const char *set;
    unsigned long long sum, x;
    Py_ssize_t count;
    float weight;
    const struct loops *loops;
    if (!PyArg_ParseTuple(args, "sKKnf", &set, &sum, &x, &count, &weight) ||
        !(loops = loops_for(set, count)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    loops->add_scaled(tensor_at(sum), tensor_at(x), (size_t)count, weight);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *subtract(PyObject *self, PyObject *args)
{
    const char *set;
    unsigned long long a, b, out;
    Py_ssize_t count;
    const struct loops *loops;
    if (!PyArg_ParseTuple(args, "sKKnK", &set, &a, &b, &count, &out) ||
        !(loops = loops_for(set, count)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    loops->subtract(tensor_at(a), tensor_at(b), (size_t)count, tensor_at(out));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static int add_sets(PyObject *module)
{
    const struct loops *found[3];
    size_t count = runnable(found);
    PyObject *names = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; names && i < count; i++)
        PyTuple_SetItem(names, (Py_ssize_t)i, PyUnicode_FromString(found[i]->set));
    int added = names ? PyModule_AddObjectRef(module, "SETS", names) : -1;
    Py_XDECREF(names);
    return added || PyModule_AddIntConstant(module, "INTERFACE", 4) ? -1 : 0;
}

static PyMethodDef METHODS[] = {
    {"encode", encode, METH_VARARGS, NULL},
    {"decode", decode, METH_VARARGS, NULL},
    {"peak", peak, METH_VARARGS, NULL},
    {"nesterov", nesterov, METH_VARARGS, NULL},
    {"scale", scale, METH_VARARGS, NULL},
    {"add_scaled", add_scaled, METH_VARARGS, NULL},
    {"subtract", subtract, METH_VARARGS, NULL},
    {0},
};

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, add_sets}, {0}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "_kernel", .m_methods = METHODS, .m_slots = SLOTS};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&MODULE); }
