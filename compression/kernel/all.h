/* All loops, for the instruction set that SET and TARGET name. */

#include "loops.h"
#include "topk.h"
#include "elementwise.h"
#include "rice.h"
#include "sparse2.h"
#include "gaps.h"
#include "ecsq.h"
